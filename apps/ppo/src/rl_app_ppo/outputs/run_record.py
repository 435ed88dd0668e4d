"""The driver's part of the record of a run: attempts, phases, steps, warnings, and the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rl_app_ppo.outputs.run_folder import RECORD, files_of
from rl_protocol import ConfigError
from rl_protocol.errors import UNREADABLE
from rl_protocol.ports import WeightSyncReport
from rl_trainer.record.read_record import Record, read_record
from rl_trainer.record.record_file import DRIVER, RecordFile
from rl_trainer.record.record_rows import AlarmRow, EndRow, PhaseRow, StartRow, StepRow, SyncRow


class RunRecord:
    """Records what the driver knows; see `RecordFile` for its lifecycle.

    Args:
        folder: of the record.
        after: step of the checkpoint that the run resumes from; 0: it begins.
        steps: steps to train.
    """

    def __init__(self, folder: Path, after: int, steps: int) -> None:
        self._file = RecordFile(folder, DRIVER)
        self._file.append([StartRow(at=time.time(), after=after, steps=steps)])

    def phases(self, phases: Sequence[tuple[str, float, float]]) -> None:
        """The phases of the start, as (name, begin, end)."""
        self._file.append([PhaseRow(at=end, name=name, began=began) for name, began, end in phases])

    def step_done(self, step: int) -> None:
        """A step is over; 0: the validation before training."""
        self._file.append([StepRow(at=time.time(), step=step)])

    def weights_synced(self, report: WeightSyncReport, began: float) -> None:
        """A synchronization that began at `began`, Unix time, is over."""
        row = SyncRow(
            at=time.time(),
            began=began,
            version=report.version,
            num_bytes=report.num_bytes,
            receivers=len(report.receivers),
        )
        self._file.append([row])

    def alarm(self, name: str, text: str) -> None:
        """A warning was printed."""
        self._file.append([AlarmRow(at=time.time(), name=name, text=text)])

    def end(self, outcome: str, text: str) -> None:
        """The run is over: finished, failed or interrupted. Closes the file."""
        self._file.append([EndRow(at=time.time(), outcome=outcome, text=text)])
        self._file.close()


def read_run(run: Path, most_tokens: int | None = None, *, step: int | None = None) -> Record:
    """Read the record of a run by its folder; the other arguments are those of `read_record`.

    Raises:
        ConfigError: it is no folder of a run, or a file can't be read.
    """
    files_of(run)
    folder = run / RECORD
    try:
        return read_record(folder, most_tokens, step=step)
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"The record {folder} can't be read: {error}.") from error
