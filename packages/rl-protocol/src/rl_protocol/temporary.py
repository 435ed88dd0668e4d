"""Temporary folders that the next process removes when their owner was killed.

The owner of a folder holds a lock (flock) on it and puts a file named MARK into it. The kernel drops the lock when the process ends, however it
ends, so a marked folder whose lock can be taken has no owner. Process ids, which a later process may have again, are not needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MARK = ".rl-temporary"
"""Only folders with a file of this name are ever removed."""


@contextmanager
def temporary_folder(prefix: str, parent: Path | None = None) -> Generator[Path]:
    """A new folder of mode 0700, removed at the end. Such folders that begin alike and lost their owner are removed first.

    Args:
        prefix: how its name begins.
        parent: existing folder to make it in; default: the system's for temporary files.

    Raises:
        OSError: it can't be made.
    """
    path, lock = owned_folder(prefix, Path(tempfile.gettempdir()) if parent is None else parent)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def owned_folder(prefix: str, parent: Path) -> tuple[Path, int]:
    """As `temporary_folder`, for the caller to remove: the folder, and the file descriptor of its lock, to be closed then.

    Raises:
        OSError: it can't be made.
    """
    sweep(prefix, parent)
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    lock = os.open(path, _FOLDER)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (path / MARK).touch()
    except OSError:
        os.close(lock)
        path.rmdir()
        raise
    return path, lock


def sweep(prefix: str, parent: Path) -> None:
    """Remove the folders of this user that `temporary_folder` made there and whose owner is gone. What can't be removed stays."""
    for path in parent.glob(f"{prefix}*"):
        with contextlib.suppress(
            OSError
        ):  # it is no folder, that of another user, locked by its owner, or gone meanwhile
            _remove_unowned(path)


def _remove_unowned(path: Path) -> None:
    lock = os.open(path, _FOLDER)
    try:
        if os.fstat(lock).st_uid == os.geteuid() and (path / MARK).exists():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
    finally:
        os.close(lock)
