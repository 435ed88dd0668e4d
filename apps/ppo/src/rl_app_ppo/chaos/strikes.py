"""How faults happen to processes, their connections and files."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rl_app_ppo.chaos.schedule import Fault, Strike
from rl_transferqueue.journal.disk_journal import SEGMENTS

_PIDFD_GETFD = 438
"""Number of the system call, on all processors; Python has no function for it."""
_LATE_S, _ON_TIME_S = 0.04, 0.01
"""How long a process with slow connections stands still, and then runs, by turns."""


def strike(pids: Sequence[int], planned: Strike) -> int:
    """Have a fault happen to processes at once; returns how many of them had it."""
    match planned.fault:
        case Fault.FULL_DISK:
            return _fill_disk(pids, planned.seconds)
        case Fault.SLOW_LINK:
            return _slow_links(pids, planned.seconds)
        case Fault.CUT:
            return sum(cut_connection(pid, planned.which) for pid in pids)
        case fault:
            return _signal(pids, fault, planned.seconds)


def _signal(pids: Sequence[int], fault: Fault, seconds: float) -> int:
    """All are stopped first, so that none sees the end of another."""
    hit = [pid for pid in pids if send(pid, signal.SIGSTOP)] if len(pids) > 1 or fault is Fault.STOP else list(pids)
    if fault is Fault.STOP:
        time.sleep(seconds)
    last = {Fault.TERMINATE: signal.SIGTERM, Fault.STOP: signal.SIGCONT}.get(fault, signal.SIGKILL)
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


def _fill_disk(pids: Sequence[int], seconds: float) -> int:
    hit = [pid for pid in pids if limit_files(pid, 0)]
    if seconds:
        time.sleep(seconds)
        for pid in hit:
            limit_files(pid, resource.RLIM_INFINITY)
    return len(hit)


def limit_files(pid: int, num_bytes: int) -> bool:
    """Let writes of a process beyond this size of a file fail with EFBIG; returns whether it was
    there."""
    with suppress(ProcessLookupError):
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, most))
        return True
    return False


def _slow_links(pids: Sequence[int], seconds: float) -> int:
    hit = [pid for pid in pids if narrow_connections(pid)]
    deadline = time.monotonic() + seconds
    while hit and time.monotonic() < deadline:
        stopped = [pid for pid in hit if send(pid, signal.SIGSTOP)]
        time.sleep(_LATE_S)
        for pid in stopped:
            send(pid, signal.SIGCONT)
        time.sleep(_ON_TIME_S)
    return len(hit)


def narrow_connections(pid: int) -> bool:
    """Have the kernel hold as few bytes as it can of what a process sends to others; returns
    whether it had a connection."""
    connections = _connections(pid)
    for connection in connections:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        connection.close()
    return bool(connections)


def cut_connection(pid: int, which: int) -> bool:
    """Shut down one connection of a process to another; returns whether it had one."""
    connections = _connections(pid)
    if connections:
        with suppress(OSError):  # the other side has closed it
            connections[which % len(connections)].shutdown(socket.SHUT_RDWR)
    for connection in connections:
        connection.close()
    return bool(connections)


def _connections(pid: int) -> list[socket.socket]:
    """Descriptors of all connections of a process to others; none: it has ended."""
    found: list[socket.socket] = []
    with suppress(OSError):  # it has ended
        pidfd = os.pidfd_open(pid)
        try:
            found += [one for fd in _sockets(pid) if (one := _connection(pidfd, fd)) is not None]
        finally:
            os.close(pidfd)
    return found


def _sockets(pid: int) -> list[int]:
    links = sorted(Path(f"/proc/{pid}/fd").iterdir(), key=lambda link: int(link.name))
    found: list[int] = []
    for link in links:
        with suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(link).startswith("socket:"):  # noqa: PTH115 - not a path
                found.append(int(link.name))
    return found


def _connection(pidfd: int, fd: int) -> socket.socket | None:
    """Another descriptor of a socket, if it is connected and one of its ends has a name; pairs of
    sockets have none."""
    mine: int = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, fd, 0)
    if mine < 0:
        return None
    found = socket.socket(fileno=mine)
    with suppress(OSError):  # not connected
        if found.getpeername() or found.getsockname():
            return found
    found.close()
    return None


def flippable(fault: Fault, journal: Path, checkpoints: Path) -> Sequence[Path]:
    """The files of which a fault of FLIPS changes a byte: segments, or the newest checkpoint."""
    if fault is Fault.FLIP_SEGMENT:
        return sorted((journal / SEGMENTS).glob("*"))
    newest = max(checkpoints.glob("step-*"), default=None)
    return sorted(path for path in newest.rglob("*") if path.is_file()) if newest is not None else []


def flip_byte(files: Sequence[Path], which: int) -> bool:
    """Change one byte among those before the zeros at the end of these files; returns whether there
    is one."""
    sizes = {file: len(file.read_bytes().rstrip(b"\0")) for file in files}
    if not sum(sizes.values()):
        return False
    place = which % sum(sizes.values())
    for file, size in sizes.items():
        if place < size:
            with file.open("r+b") as opened:
                opened.seek(place)
                (old,) = opened.read(1)
                opened.seek(place)
                opened.write(bytes([old ^ 0x10]))
            break
        place -= size
    return True
