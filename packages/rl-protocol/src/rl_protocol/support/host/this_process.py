"""Limits of this process: the life of its parent, its memory and its cores."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
import time
from pathlib import Path

from rl_protocol.support.host.control_groups import core_quota
from rl_protocol.support.host.portable import uses_linux

EVERY_S = 0.25
"""How often the portable way looks whether the parent has ended."""
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Kill this process when its parent ends: the kernel does it on Linux, elsewhere a thread."""
    if uses_linux():
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_kill_after, args=(os.getppid(),), name="parent-watch", daemon=True).start()


def end_at_sigterm() -> None:
    """Have SIGTERM kill this process at once, without its Python handler; callable in any thread,
    while `signal.signal` needs the main thread."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGTERM, None)  # SIG_DFL


def limit_memory(nbytes: int, *, further: bool = False) -> None:
    """Limit the address space of this process; only Linux can, elsewhere nothing happens.

    Args:
        nbytes: its size.
        further: in addition to the present size.
    """
    if uses_linux():
        if further:
            nbytes += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))


def give_back_memory() -> None:
    """Return freed memory that the C library keeps for later to the kernel; only glibc can,
    elsewhere nothing happens."""
    if uses_linux() and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def usable_cores() -> int:
    """The cores that this process may use, by its affinity and by the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if uses_linux() else os.cpu_count() or 1
    return min(cores, core_quota() or cores)


def _kill_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(EVERY_S)
    os.kill(os.getpid(), signal.SIGKILL)
