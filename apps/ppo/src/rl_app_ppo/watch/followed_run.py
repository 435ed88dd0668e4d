"""Reads a run again and again while it goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rl_app_ppo.outputs.metrics_file import more_metrics
from rl_app_ppo.outputs.run_folder import files_of, is_free
from rl_protocol import ConfigError
from rl_trainer.record.read_record import Record, RecordReader

SCORE, VALIDATION = "critic/score/mean", "val-core/"
"""The metrics of curves: the mean score, and what starts so."""
RECENT_S = 60.0
"""Seconds over which the busy share of a worker is taken; of older spans only the last one of each
worker is kept."""
QUIET_S = 10.0
"""Seconds without a new row after which the run's lock is tried."""


@dataclass(kw_only=True)
class Seen:
    """A run at one moment."""

    name: str
    record: Record = field(default_factory=Record)
    """Without trajectories and old spans."""
    metrics: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    """Step 0, if it is there, is the validation before training. The read that finds a line gives
    all of it; older lines, but for the newest, have the metrics of curves alone."""
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
        self._files = files_of(folder)
        self._reader = RecordReader(self._files.record, recent_s=RECENT_S)
        self._seen = Seen(name=self._files.folder.name)
        self._file: tuple[int, int] | None = None
        """Of the metrics file: its inode, and the bytes that were read."""
        self._thinned = 0
        """Lines that have the metrics of curves alone."""

    def read(self, now: float) -> Seen:
        """The run at `now`, Unix time; the same object each time.

        Raises:
            ConfigError: a file of it can't be read.
        """
        try:
            self._seen.record = self._reader.read()
            if self._files.metrics.exists():
                self._read_metrics()
        except (OSError, ValueError) as error:
            raise ConfigError(f"The run {self._files.folder} can't be read: {error}.") from error
        quiet = abs(now - _newest(self._seen.record)) > QUIET_S  # before: the clock was set back
        self._seen.killed = quiet and self._seen.record.end is None and is_free(self._files.folder)
        return self._seen

    def _read_metrics(self) -> None:
        """Read what was appended to the metrics, or all of the file that a resumed run has cut."""
        status, lines = self._files.metrics.stat(), self._seen.metrics
        if self._file is None or self._file[0] != status.st_ino or self._file[1] > status.st_size:
            lines.clear()
            self._file, self._thinned = (status.st_ino, 0), 0
        more, end = more_metrics(self._files.metrics, self._file[1])
        old = len(lines) if more else len(lines) - 1
        for i in range(self._thinned, old):
            lines[i] = {name: value for name, value in lines[i].items() if _in_a_curve(name)}
        self._thinned = max(self._thinned, old)
        lines += more
        self._file = self._file[0], end


def _in_a_curve(name: str) -> bool:
    return name in ("step", SCORE) or name.startswith(VALIDATION)


def _newest(record: Record) -> float:
    """When the last row was written; 0 if there is none."""
    lists = (record.starts, record.phases, record.steps, record.alarms, record.calls, record.spans, record.syncs)
    return max((rows[-1].at for rows in lists if rows), default=0.0)
