"""Which process is meant, and whether it still runs: by pid and start time, watched through a pidfd."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from rl_protocol.errors import PlaneLostError


class ProcessId(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A process of this host that can't be mistaken for a later one with the same pid."""

    pid: int
    start: int
    """Clock ticks after boot at which it was started."""


def _start_of(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


def this_process() -> ProcessId:
    """The calling process."""
    start = _start_of(os.getpid())
    assert start is not None
    return ProcessId(os.getpid(), start)


def identify(pid: int) -> ProcessId:
    """The running process with that pid.

    Raises:
        PlaneLostError: there is none.
    """
    start = _start_of(pid)
    if start is None:
        raise PlaneLostError(f"Process {pid} does not run any more.")
    return ProcessId(pid, start)


def open_pidfd(process: ProcessId, what: str) -> int:
    """A file descriptor that becomes readable when the process ends; the caller closes it.

    Raises:
        PlaneLostError: the process is gone, or lives in another pid namespace.
    """
    gone = f"{what} (pid {process.pid}) does not run on this host, or not in this pid namespace."
    try:
        fd = os.pidfd_open(process.pid)
    except (ProcessLookupError, OverflowError, OSError) as error:
        raise PlaneLostError(f"{gone} {error}") from error
    if _start_of(process.pid) != process.start:
        os.close(fd)
        raise PlaneLostError(gone)
    return fd
