"""The processes of a run, found by a variable of their environment, and faults of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rl_app_ppo.chaos.schedule import Fault

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


def strike(pids: Sequence[int], fault: Fault, seconds: float) -> int:
    """Have a fault happen to processes at once; returns how many of them were there.

    All are stopped first, so that none sees the end of another.
    """
    hit = [pid for pid in pids if send(pid, signal.SIGSTOP)] if len(pids) > 1 or fault is Fault.STOP else list(pids)
    if fault is Fault.STOP:
        time.sleep(seconds)
    last = {Fault.KILL: signal.SIGKILL, Fault.TERMINATE: signal.SIGTERM, Fault.STOP: signal.SIGCONT}[fault]
    hit = [pid for pid in hit if send(pid, last)]
    if fault is Fault.TERMINATE and len(pids) > 1:
        for pid in hit:
            send(pid, signal.SIGCONT)
    return len(hit)


def send(pid: int, what: int) -> bool:
    """Send a signal; returns whether the process was there."""
    try:
        os.kill(pid, what)
    except ProcessLookupError:
        return False
    return True


def shared_memory() -> set[str]:
    """Names of the files in shared memory."""
    return {path.name for path in SHARED_MEMORY.iterdir()}
