"""The processes of a run, found by a variable of their environment."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MARK = "RL_CHAOS_RUN"
"""Environment variable that every process of a run inherits."""
SHARED_MEMORY = Path("/dev/shm")
POLL_S = 0.002
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


def marked(mark: str) -> list[int]:
    """Ids of the processes with this value of MARK that run, or are stopped."""
    wanted = f"{MARK}={mark}".encode()
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(*_GONE):
                if wanted in (folder / "environ").read_bytes().split(b"\0") and _runs(folder):
                    found.append(int(folder.name))
    return found


def _runs(folder: Path) -> bool:
    return (folder / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"


def describe(pid: int) -> str:
    """Id and command of a process."""
    with suppress(*_GONE):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"process {pid}: {command[:160].strip()}"
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
    """Names of the files in shared memory."""
    return {path.name for path in SHARED_MEMORY.iterdir()}


def unused(names: set[str]) -> set[str]:
    """Those of these files in shared memory that no process has mapped: others may be of programs
    beside the run."""
    mapped: set[str] = set()
    if names:
        for path in Path("/proc").glob("[0-9]*/maps"):
            with suppress(*_GONE):
                mapped.update(re.findall(rf"{SHARED_MEMORY}/(\S+)", path.read_text(errors="replace")))
    return {name for name in names - mapped if (SHARED_MEMORY / name).exists()}
