"""A heartbeat shows that a process runs: a thread of it counts in a file of this host.

A process that is stopped does not count, nor does one in which a thread keeps the GIL for ever.
"""

from __future__ import annotations

import mmap
import threading
import time
from pathlib import Path

PERIOD_S = 1.0
"""Seconds between two beats."""
_BYTES = 8


def beat(file: Path, period_s: float = PERIOD_S) -> None:
    """Have this process count in a file, from now on, in a thread that ends with the process.

    Args:
        file: on a disk of this host; replaced by one with the count in 8 bytes, little-endian.
        period_s: seconds between two beats.

    Raises:
        OSError: the file can't be made.
    """
    with file.open("wb+") as opened:
        opened.write(bytes(_BYTES))
        opened.flush()
        count = mmap.mmap(opened.fileno(), _BYTES)  # later writes can't fail, as on a full disk
    threading.Thread(target=_count, args=(count, period_s), name="heartbeat", daemon=True).start()


def _count(count: mmap.mmap, period_s: float) -> None:
    number = 0
    while True:
        number += 1
        count[:] = number.to_bytes(_BYTES, "little")
        time.sleep(period_s)


def read_beat(file: Path) -> int | None:
    """The count in a file of `beat`; None: there is no such file."""
    try:
        return int.from_bytes(file.read_bytes(), "little")
    except FileNotFoundError:
        return None


class Stillness:
    """Tells which processes have not counted for a number of looks.

    Looks are counted, not seconds, so that no process counts as still after the machine was
    suspended or the driver stopped.

    Args:
        looks: in a row with the same count, after which a process counts as still.

    Example:
        >>> stillness = Stillness(2)
        >>> [stillness.look("actor", count) for count in (7, 7, 8, 8, 8)]
        [False, False, False, False, True]
    """

    def __init__(self, looks: int) -> None:
        self._looks = looks
        self._seen: dict[str, tuple[int, int]] = {}
        """Process -> its count, and looks since it has changed."""

    def look(self, process: str, count: int) -> bool:
        """Note the count of a process; whether it is still."""
        before, looks = self._seen.get(process, (None, 0))
        looks = looks + 1 if count == before else 0
        self._seen[process] = count, looks
        return looks >= self._looks
