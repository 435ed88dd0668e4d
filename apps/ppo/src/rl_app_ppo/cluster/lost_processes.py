"""Name the server processes that ended or are stopped in the error of a failed run."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

import psutil

from rl_app_ppo.cluster.hung_processes import HungProcesses
from rl_app_ppo.cluster.ray_errors import reason_of
from rl_protocol import ConfigError, HangError, OutputError, RLError, WorkerDiedError
from rl_protocol.support.host.portable import uses_linux

T = TypeVar("T")
_LOOK_S = 1.0
"""Seconds between two looks at processes whose end nothing announces."""
_THREADS_S = 1.0
"""Longer than the threads of a process that was killed need to end."""
_PAUSE_S = 1e-3
NOTICE_S = 30.0
"""Longer than Ray needs to notice that a host is lost."""

GCS_SERVER = "The GCS server of Ray"
RAY_SERVERS = {"gcs_server": GCS_SERVER, "raylet": "The raylet of Ray"}
"""Command -> description of the processes that ray.init starts."""


@contextmanager
def named_losses(
    processes: Callable[[], Mapping[int, str]], hung: HungProcesses, *, deaths_named: bool = False
) -> Generator[None]:
    """Prefix an error with the processes that ended or are stopped, and that it does not name yet.

    Args:
        processes: process id -> description, of processes of this host.
        hung: those that the run has killed.
        deaths_named: a WorkerDiedError names those that ended, so only stopped ones are added.

    Raises:
        WorkerDiedError: one of them ended or is stopped; names it, how it ended, the stage and the
            error that followed.
        RLError: unchanged if all of them run, if it names those that do not, or if it is a
            ConfigError or an OutputError.
    """
    try:
        yield
    except (ConfigError, OutputError):
        raise
    except RLError as error:
        deaths = not (deaths_named and isinstance(error, WorkerDiedError))
        unnamed = {pid: what for pid, what in processes().items() if f"(process {pid})" not in error.message}
        fates = ((what, pid, hung.end_of(pid) or fate(pid)) for pid, what in unnamed.items() if deaths or _stopped(pid))
        lost = [f"{what} (process {pid}) {how}" for what, pid, how in fates if how]
        if not lost:
            raise
        during = f" during {', '.join(places)}" if (places := _places(error)) else ""
        kind = type(error) if isinstance(error, WorkerDiedError) else WorkerDiedError  # a limit stays one
        raise kind(f"{'; '.join(lost)}{during}. Because of that: {error}") from error


@asynccontextmanager
async def named_remote_losses(
    ends: Mapping[str, asyncio.Future[Any]], hung: HungProcesses, *, notice_s: float = NOTICE_S
) -> AsyncGenerator[None]:
    """Prefix an error with the processes of other hosts that ended.

    The ranks of a model fail as soon as one of them is gone, and only name its socket.

    Args:
        ends: description of a process -> what fails with the reason once Ray has lost the process.
        hung: those that the run has killed.
        notice_s: longest wait, after an error, for Ray to notice; a HangError comes after a wait.

    Raises:
        WorkerDiedError: a process ended; names it, the reason, and the error that followed.
        RLError: unchanged if none did, or if it says more than that one ended.
    """
    try:
        yield
    except (ConfigError, OutputError, WorkerDiedError):
        raise
    except RLError as error:
        if ends and not isinstance(error, HangError):
            await asyncio.wait(ends.values(), timeout=notice_s, return_when=asyncio.FIRST_COMPLETED)
        gone = {what: end for what, end in ends.items() if end.done() or hung.end_by_name(what)}
        lost = [f"{what} {hung.end_by_name(what) or f'has ended ({_reason(end)})'}" for what, end in gone.items()]
        if not lost:
            raise
        raise WorkerDiedError(f"{'; '.join(lost)}. Because of that: {error}") from error


def _reason(end: asyncio.Future[Any]) -> str:
    error = None if end.cancelled() else end.exception()
    return "without an error" if error is None else reason_of(error)


def _places(error: BaseException) -> list[str]:
    """The stages noted on the error, innermost first, or those of the error before it."""
    notes: list[str] = [] if error.__context__ is None else _places(error.__context__)
    return list(dict.fromkeys([*notes, *getattr(error, "__notes__", [])]))


async def unless_ended(answer: Awaitable[T], ends: Callable[[], Sequence[str]], what: str) -> T:
    """Await an answer that never comes once one of some processes has ended.

    Args:
        answer: the answer.
        ends: which of them have ended, and how: see `ended`.
        what: what has no answer then, for the message.

    Raises:
        WorkerDiedError: one of them has ended; one that is stopped may go on.
    """
    waiting = asyncio.ensure_future(answer)
    try:
        while not waiting.done():
            await asyncio.wait([waiting], timeout=_LOOK_S)
            if not waiting.done() and (lost := ends()):
                raise WorkerDiedError(f"{what}: {'; '.join(lost)}.")
        return await waiting
    finally:
        waiting.cancel()


@asynccontextmanager
async def ended_with(processes: Mapping[int, str]) -> AsyncGenerator[None]:
    """End the work within once one of these processes has ended.

    Args:
        processes: process id -> description, of processes of this host.

    Raises:
        WorkerDiedError: one of them has ended; names it.
    """
    task, lost = asyncio.current_task(), list[str]()
    assert task is not None, "the driver runs in a task"

    async def watch() -> None:
        while not lost:
            await asyncio.sleep(_LOOK_S)
            lost.extend(ended(processes))
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not lost:
            raise
        task.uncancel()
        raise WorkerDiedError(f"{'; '.join(lost)}.") from None
    finally:
        watching.cancel()


def ended(processes: Mapping[int, str], elsewhere: Mapping[str, asyncio.Future[Any]] | None = None) -> list[str]:
    """Which of these processes have ended, and how.

    Args:
        processes: process id -> description, of processes of this host.
        elsewhere: as `ends` of `named_remote_losses`.
    """
    here = [f"{name} (process {pid}) {how}" for pid, name in processes.items() if (how := end_of(pid))]
    return [*here, *(f"{what} has ended ({_reason(end)})" for what, end in (elsewhere or {}).items() if end.done())]


def fate(pid: int) -> str:
    """How a process ended, or that it is stopped; empty while it runs."""
    if how := end_of(pid):
        return how
    return "is stopped (SIGSTOP, or a debugger): SIGCONT lets it run" if _stopped(pid) else ""


def _stopped(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def end_of(pid: int) -> str:
    """How a process ended; empty while it runs or is stopped."""
    if ended := _end_of_child(pid):
        return _how(ended)
    try:
        state = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "is gone"
    if state not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return ""
    # a zombie: its parent has not waited for it, which it can once all threads have ended
    ended = _end_of_child(pid, wait_s=_THREADS_S)
    return _how(ended) if ended is not None else "has ended"


def _how(ended: os.waitid_result) -> str:
    killed = ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
    return f"was killed by {signal.Signals(ended.si_status).name}" if killed else f"ended with code {ended.si_status}"


def ray_servers() -> dict[int, str]:
    """Process id -> description of the Ray servers that this process has started."""
    found: dict[int, str] = {}
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # a child that has just ended
            if (command := child.name()) in RAY_SERVERS:
                found[child.pid] = RAY_SERVERS[command]
    return found


def _end_of_child(pid: int, *, wait_s: float = 0.0) -> os.waitid_result | None:
    """How a child of this process ended, within so many seconds; it stays to be waited for. macOS
    does not tell."""
    deadline = time.monotonic() + wait_s
    while uses_linux():
        try:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # not a child of this process, or it has been waited for elsewhere
            return None
        if ended is not None or time.monotonic() >= deadline:
            return ended
        time.sleep(_PAUSE_S)
    return None
