"""Identify processes, and get a descriptor that becomes readable when one ends.

On Linux that is a pidfd, elsewhere a socket to which a thread of this process writes: it looks at
the watched processes EVERY_S.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from rl_protocol.support.host.portable import uses_linux

EVERY_S = 0.05
"""How often the portable way looks whether a process has ended."""


def start_of(pid: int) -> int | None:
    """When a process started, in a unit of the platform; None: it does not run.

    A later process with the same pid has another start.
    """
    return _start_in_proc(pid) if uses_linux() else _start_by_psutil(pid)


def age_of(pid: int) -> float | None:
    """Seconds since a process started, elsewhere than on Linux to within a second; None: it does
    not run."""
    start = start_of(pid)
    if start is None:
        return None
    if uses_linux():
        return time.clock_gettime(time.CLOCK_BOOTTIME) - start / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.time() - start / 1000)


def open_process(pid: int) -> int:
    """A file descriptor that becomes readable when the process ends; the caller closes it.

    Raises:
        OSError: there is no such process.
        OverflowError: this is no process id.
    """
    return os.pidfd_open(pid) if uses_linux() else _watchers.setdefault(os.getpid(), _Watcher()).watch(pid)


def _start_in_proc(pid: int) -> int | None:
    """Clock ticks after boot."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


def _start_by_psutil(pid: int) -> int | None:
    """Milliseconds since 1970."""
    import psutil  # elsewhere than on Linux a dependency

    try:
        process = psutil.Process(pid)
        ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return None if ended else round(process.create_time() * 1000)
    except (psutil.Error, ValueError, OverflowError):
        return None


class _Watcher:
    """A thread that looks at processes; it ends when there is none to watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[socket.socket, tuple[int, int]] = {}
        """Our end of each pair -> the process and its start."""
        self._runs = False

    def watch(self, pid: int) -> int:
        start = start_of(pid)
        if start is None:
            raise ProcessLookupError(f"Process {pid} does not run.")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with self._lock:
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="process-watch", daemon=True).start()
            self._watched[ours] = (pid, start)
        return theirs.detach()

    def _run(self) -> None:
        while True:
            time.sleep(EVERY_S)
            with self._lock:
                for ours, (pid, start) in list(self._watched.items()):
                    if start_of(pid) != start:
                        with suppress(OSError):  # the caller has closed its end
                            ours.send(b"\0")
                    elif not _closed(ours):
                        continue
                    del self._watched[ours]
                    ours.close()
                if not self._watched:
                    self._runs = False
                    return


def _closed(ours: socket.socket) -> bool:
    """Whether the other end is closed; it sends nothing."""
    poll = select.poll()
    poll.register(ours, select.POLLIN)
    return bool(poll.poll(0))


_watchers: dict[int, _Watcher] = {}
"""One for each process: a fork has neither the thread nor a free lock of its parent."""
