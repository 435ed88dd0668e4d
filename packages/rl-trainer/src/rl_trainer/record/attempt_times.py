"""Times of a record that grow from attempt to attempt, also if the system clock was set back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from rl_trainer.record.record_file import DRIVER, SUFFIX
from rl_trainer.record.record_rows import RecordRow, StartRow

_DRIVER_FILE = re.compile(rf"{DRIVER}(?:\.(\d+))?{re.escape(SUFFIX)}")
_GAP_S = 10.0
"""Seconds between an attempt and the one before it if the clock does not say: workers may write for
some time after their driver."""


def reading_order(path: Path) -> tuple[bool, int, str]:
    """Sort key of the files of a record: the driver's first, which begin the attempts, in order."""
    found = _DRIVER_FILE.fullmatch(path.name)
    return (False, int(found[1] or 1), "") if found else (True, 0, path.name)


class AttemptTimes:
    """Moves the rows of an attempt that begins before the last row of the driver in an earlier one.

    Rows of a file with a StartRow are of its attempt. Other rows are of the latest attempt, by the
    clock, that began before them. Give it the rows of each file in order, and the files by
    `reading_order`.
    """

    def __init__(self) -> None:
        self._shifts: dict[Path, tuple[float, float]] = {}
        """File of an attempt -> when it began by the clock, and seconds to move its rows by."""
        self._latest = 0.0

    def moved(self, row: RecordRow, path: Path) -> RecordRow:
        """The row, which is in the file `path`, with its times in those of the record."""
        if isinstance(row, StartRow):
            late = row.at < self._latest
            self._shifts[path] = row.at, self._latest + _GAP_S - row.at if late else 0.0
        of_file = self._shifts.get(path)
        shift = self._shift_at(row.at) if of_file is None else of_file[1]
        if shift:
            times: dict[str, Any] = {name: getattr(row, name) + shift for name in ("at", "began") if hasattr(row, name)}
            row = msgspec.structs.replace(row, **times)
        if of_file is not None:
            self._latest = max(self._latest, row.at)
        return row

    def _shift_at(self, at: float) -> float:
        return max((begun for begun in self._shifts.values() if begun[0] <= at), default=(0.0, 0.0))[1]
