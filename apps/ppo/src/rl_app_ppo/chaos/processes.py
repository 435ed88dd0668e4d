"""The processes of a run, found by a variable of their environment."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "RL_CHAOS_RUN"
"""Environment variable that every process of a run inherits."""
SHARED_MEMORY = Path("/dev/shm")
POLL_S = 0.002
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def marked(mark: str) -> list[int]:
    """Ids of the processes with this value of MARK that run, or are stopped."""
    found: list[int] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has just ended, or belongs to another user
            if process.environ().get(MARK) == mark and process.status() not in _ENDED:
                found.append(process.pid)
    return found


def describe(pid: int) -> str:
    """Id and command of a process."""
    with suppress(psutil.Error):
        return f"process {pid}: {' '.join(psutil.Process(pid).cmdline())[:160].strip()}"
    return f"process {pid}"


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition; returns whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def shared_memory() -> set[str]:
    """Names of the files in shared memory; none where a system has no such folder."""
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def left_in_memory(before: set[str], seconds: float) -> set[str]:
    """Names of the files in shared memory that are new since `before` and that no process has
    mapped.

    Others may be of programs beside the run. One of these that ends unmaps its files first and then
    deletes them, so this waits, at most so many seconds, until there are none.
    """
    wait_until(lambda: not _unmapped(shared_memory() - before), seconds)
    return _unmapped(shared_memory() - before)


def _unmapped(names: set[str]) -> set[str]:
    """Those of these files in shared memory that no process has mapped."""
    mapped: set[str] = set()
    if names:
        for path in Path("/proc").glob("[0-9]*/maps"):
            with suppress(FileNotFoundError, PermissionError, ProcessLookupError):
                mapped.update(re.findall(rf"{SHARED_MEMORY}/(\S+)", path.read_text(errors="replace")))
    return {name for name in names - mapped if (SHARED_MEMORY / name).exists()}
