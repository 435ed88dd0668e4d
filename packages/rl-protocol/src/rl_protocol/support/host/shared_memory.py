"""Memory that other processes of this user map: by the owner's pid and a number.

On Linux it is an anonymous file (memfd) without a name, which other processes open through
/proc/<pid>/fd/<number>. Elsewhere it is a file in a folder of its process in SHARED_FOLDER, of mode
0700; a later process removes the folder of one that was killed.
"""

from __future__ import annotations

import atexit
import os
import shutil
import threading
import uuid
from pathlib import Path

from rl_protocol.support.host.portable import SHARED_FOLDER, uses_linux
from rl_protocol.support.temporary_folders import owned_folder

_PREFIX = "rl-memory-"
_folders: dict[int, Path] = {}
"""This process -> its folder; a fork has another one."""
_locks: dict[int, threading.Lock] = {}
"""One for each process, as a fork could find a lock taken for ever."""


def create_memory(name: str) -> int:
    """Empty memory; its file descriptor is also its number for other processes.

    Args:
        name: shown in /proc/<pid>/maps on Linux.

    Raises:
        OSError: it can't be created.
    """
    if uses_linux():
        return os.memfd_create(name, os.MFD_CLOEXEC)
    folder = _own_folder()
    temporary = folder / f".{uuid.uuid4().hex}"
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.replace(temporary, folder / str(fd))  # noqa: PTH105 - the atomic step
    return fd


def memory_path(pid: int, number: int) -> Path:
    """The path by which other processes open memory.

    Raises:
        FileNotFoundError: the process has none.
    """
    if uses_linux():
        return Path(f"/proc/{pid}/fd/{number}")
    for folder in SHARED_FOLDER.glob(f"{_PREFIX}{pid}-*"):
        return folder / str(number)
    raise FileNotFoundError(f"{SHARED_FOLDER}/{_PREFIX}{pid}-*")


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
