"""Processes that a run can't do without: when it fails, the error names those of them that ended or are stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from rl_protocol import ConfigError, OutputError, RLError, WorkerDiedError

RAY_SERVERS = {"gcs_server": "The GCS server of Ray", "raylet": "The raylet of Ray"}
"""Command -> what it is, of processes that ray.init starts beside this one."""


@contextmanager
def named_losses(processes: Mapping[int, str]) -> Generator[None]:
    """Name processes that ended or are stopped in front of the error that they caused.

    Args:
        processes: process id -> what it is; children of this process.

    Raises:
        WorkerDiedError: one of them ended or is stopped; says which, how, in which stage, and what came of it.
        RLError: unchanged, when all of them run, or when it is a ConfigError or an OutputError.
    """
    try:
        yield
    except (ConfigError, OutputError):
        raise
    except RLError as error:
        lost = [f"{what} (process {pid}) {how}" for pid, what in processes.items() if (how := fate(pid))]
        if not lost:
            raise
        during = f" during {', '.join(places)}" if (places := _places(error)) else ""
        raise WorkerDiedError(f"{'; '.join(lost)}{during}. Because of that: {error}") from error


def _places(error: BaseException) -> list[str]:
    """Where it came up, the innermost place first; what failed in a clean-up came up where the first failure did."""
    notes: list[str] = [] if error.__context__ is None else _places(error.__context__)
    return list(dict.fromkeys([*notes, *getattr(error, "__notes__", [])]))


def fate(pid: int) -> str:
    """How a process ended or that it is stopped; empty while it runs."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # something else has waited for it
        return "" if Path(f"/proc/{pid}").exists() else "is gone"
    if ended is not None:
        killed = ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        return (
            f"was killed by {signal.Signals(ended.si_status).name}" if killed else f"ended with code {ended.si_status}"
        )
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "is stopped (SIGSTOP, or a debugger): SIGCONT lets it run" if state in "Tt" else ""


def ray_servers() -> dict[int, str]:
    """Those that this process has started, as `named_losses` wants them."""
    found: dict[int, str] = {}
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, children.read_text().split()):
            with suppress(FileNotFoundError, ProcessLookupError):  # a child of another kind that has just ended
                command = Path(f"/proc/{pid}/comm").read_text().strip()
                if command in RAY_SERVERS:
                    found[pid] = RAY_SERVERS[command]
    return found
