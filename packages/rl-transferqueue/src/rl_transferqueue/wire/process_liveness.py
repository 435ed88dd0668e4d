"""Process identities (pid and start time), and descriptors that show when a process has ended."""

from __future__ import annotations

import contextlib
import os

import msgspec

from rl_protocol.errors import PlaneLostError
from rl_protocol.support.host.process_watch import open_process, start_of

_lifelines: dict[str, int] = {}
"""Plane whose servers are threads of this process -> read end of a pipe that ends with it."""


class ProcessId(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A process of this host; a later process with the same pid is not equal to it."""

    pid: int
    start: int
    """Its start, in a unit of the platform: `start_of`."""


def this_process() -> ProcessId:
    """The calling process."""
    start = start_of(os.getpid())
    assert start is not None
    return ProcessId(os.getpid(), start)


def identify(pid: int) -> ProcessId:
    """The running process with that pid.

    Raises:
        PlaneLostError: no process with that pid runs.
    """
    start = start_of(pid)
    if start is None:
        raise PlaneLostError(f"Process {pid} does not run any more.")
    return ProcessId(pid, start)


def open_pidfd(process: ProcessId, what: str) -> int:
    """A file descriptor that becomes readable when the process ends; the caller closes it.

    Raises:
        PlaneLostError: the process is gone, or lives in another pid namespace, or this process has
            no file descriptor left.
    """
    gone = f"{what} (pid {process.pid}) does not run on this host, or not in this pid namespace."
    with contextlib.ExitStack() as undo:
        try:
            fd = open_process(process.pid)
            undo.callback(os.close, fd)
            start = start_of(process.pid)
        except (ProcessLookupError, OverflowError) as error:
            raise PlaneLostError(f"{gone} {error}") from error
        except OSError as error:
            raise PlaneLostError(f"{what} (pid {process.pid}) can't be watched: {error}.") from error
        if start != process.start:
            raise PlaneLostError(gone)
        undo.pop_all()
    return fd


def add_lifeline(plane: str, fd: int) -> None:
    """Register a plane whose servers are threads of this process; `fd` becomes readable when they
    end."""
    _lifelines[plane] = fd


def pop_lifeline(plane: str) -> int | None:
    """Remove the plane; returns its descriptor, or None if it was removed before."""
    return _lifelines.pop(plane, None)


def lifeline(plane: str) -> int:
    """A file descriptor that becomes readable when the plane ends; the caller closes it.

    Raises:
        PlaneLostError: the plane has ended, or runs in another process.
    """
    if plane not in _lifelines:
        raise PlaneLostError(
            "The data plane has ended, or lives in the memory of another process (TransferQueueConfig.backend=memory)."
        )
    return os.dup(_lifelines[plane])
