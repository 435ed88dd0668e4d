"""Reads a run again and again while it goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rl_app_ppo.outputs.metrics_file import read_metrics
from rl_app_ppo.outputs.run_folder import RunFiles, is_free
from rl_protocol import ConfigError
from rl_trainer.record.read_record import Record, RecordReader

QUIET_S = 10.0
"""Seconds without a new row after which the run's lock is tried."""


@dataclass(kw_only=True)
class Seen:
    """A run at one moment."""

    name: str
    record: Record = field(default_factory=Record)
    """Without trajectories."""
    metrics: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    """Step 0, if it is there, is the validation before training."""
    killed: bool = False
    """It has no end in its record, and no process holds its folder."""

    @property
    def over(self) -> bool:
        return self.killed or self.record.end is not None


class FollowedRun:
    """A run that is read while it goes on.

    Args:
        folder: of the run.

    Raises:
        ConfigError: it is no folder of a run.
    """

    def __init__(self, folder: Path) -> None:
        self._files = RunFiles(folder=folder.resolve())
        if not self._files.config.is_file():
            raise ConfigError(
                f"{folder} is no folder of a run, which has a config.yaml; give the folder that the run printed at its start."
            )
        self._reader = RecordReader(self._files.record, trajectories=False)
        self._seen = Seen(name=self._files.folder.name)
        self._size = -1

    def read(self, now: float) -> Seen:
        """The run at `now`, Unix time; the same object each time.

        Raises:
            ConfigError: a file of it can't be read.
        """
        try:
            self._seen.record = self._reader.read()
            size = self._files.metrics.stat().st_size if self._files.metrics.exists() else 0
            if size != self._size:
                self._seen.metrics, self._size = read_metrics(self._files.metrics), size
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"The run {self._files.folder} can't be read: {error}.") from error
        quiet = now - _newest(self._seen.record) > QUIET_S
        self._seen.killed = quiet and self._seen.record.end is None and is_free(self._files.folder)
        return self._seen


def _newest(record: Record) -> float:
    """When the last row was written; 0 if there is none."""
    lists = (record.starts, record.phases, record.steps, record.alarms, record.calls, record.spans)
    return max((rows[-1].at for rows in lists if rows), default=0.0)
