"""A heartbeat shows that a process runs: a thread of it counts in a file or in memory of its host.

A process that is stopped does not count, nor does one in which a thread keeps the GIL for ever.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

from rl_protocol.support.host.shared_memory import create_memory, memory_path

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
        _start(opened.fileno(), period_s)


def beat_in_memory(period_s: float = PERIOD_S) -> Path:
    """Have this process count in memory, which ends with it; otherwise as `beat`.

    Args:
        period_s: seconds between two beats.

    Returns:
        The path by which processes of this host and user read the count.

    Raises:
        OSError: the memory can't be created.
    """
    number = create_memory("heartbeat")
    os.ftruncate(number, _BYTES)
    _start(number, period_s)
    return memory_path(os.getpid(), number)


def _start(fd: int, period_s: float) -> None:
    """Count in an open file of 8 bytes."""
    count = mmap.mmap(fd, _BYTES)  # later writes can't fail, as on a full disk
    threading.Thread(target=_count, args=(count, period_s), name="heartbeat", daemon=True).start()


def _count(count: mmap.mmap, period_s: float) -> None:
    number = 0
    while True:
        number += 1
        count[:] = number.to_bytes(_BYTES, "little")
        time.sleep(period_s)


def read_beat(file: Path) -> int | None:
    """The count of `beat` or `beat_in_memory`; None: there is no such file, or the process has
    ended."""
    try:
        return int.from_bytes(file.read_bytes(), "little")
    except (FileNotFoundError, PermissionError, ProcessLookupError):  # a zombie's files belong to root
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
