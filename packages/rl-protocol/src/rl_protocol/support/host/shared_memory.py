"""Memory that other processes of this user map: by the owner's pid and a number.

On Linux it is an anonymous file (memfd) without a name, which other processes open through
/proc/<pid>/fd/<number>. Elsewhere it is a file in a folder of its process in SHARED_FOLDER, of mode
0700; a later process removes the folder of one that was killed.
"""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import threading
import uuid
from pathlib import Path

from rl_protocol.support.host.portable import SHARED_FOLDER, uses_linux
from rl_protocol.support.host.process_watch import start_of
from rl_protocol.support.temporary_folders import owned_folder

_PREFIX = "rl-memory-"
_ZEROS = bytes(1 << 20)
_folders: dict[int, Path] = {}
"""This process -> its folder; a fork has another one."""
_locks: dict[int, threading.Lock] = {}
"""One for each process, as a fork could find a lock taken for ever."""


def create_memory(name: str, *, sealing: bool = False) -> int:
    """Empty memory; its file descriptor is also its number for other processes.

    Args:
        name: shown in /proc/<pid>/maps on Linux.
        sealing: allow seals, which only Linux has.

    Raises:
        OSError: it can't be created.
    """
    if uses_linux():
        return os.memfd_create(name, os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if sealing else 0))
    folder = _own_folder()
    temporary = folder / f".{uuid.uuid4().hex}"
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.replace(temporary, folder / str(fd))  # noqa: PTH105 - the atomic step
    return fd


def memory_path(pid: int, number: int) -> Path:
    """The path by which other processes open memory.

    Raises:
        FileNotFoundError: the process has none, or has ended.
    """
    if uses_linux():
        return Path(f"/proc/{pid}/fd/{number}")
    folder = next(SHARED_FOLDER.glob(f"{_PREFIX}{pid}-*"), None)
    if folder is None or start_of(pid) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{SHARED_FOLDER}/{_PREFIX}{pid}-*")
    return folder / str(number)


def allocate(fd: int, start: int, nbytes: int) -> None:
    """Give a part of the memory its pages, which nothing has written to yet.

    Raises:
        OSError: there is not enough memory.
    """
    if uses_linux():
        os.posix_fallocate(fd, start, nbytes)
        return
    for begin in range(start, start + nbytes, len(_ZEROS)):
        os.pwrite(fd, _ZEROS[: start + nbytes - begin], begin)


def close_memory(fd: int) -> None:
    """Close memory; it is freed once no process maps it."""
    if not uses_linux() and os.getpid() in _folders:
        (_folders[os.getpid()] / str(fd)).unlink(missing_ok=True)
    os.close(fd)


def _own_folder() -> Path:
    pid = os.getpid()
    with _locks.setdefault(pid, threading.Lock()):
        if pid not in _folders:
            # The lock that owns the folder is closed by the end of the process.
            _folders[pid], _ = owned_folder(f"{_PREFIX}{pid}-", SHARED_FOLDER, swept=_PREFIX)
            atexit.register(_remove, _folders[pid], pid)
        return _folders[pid]


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
