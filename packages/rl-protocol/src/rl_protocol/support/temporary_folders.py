"""Temporary folders that a later process removes if their owner was killed.

The owner locks its folder (flock) and puts a file named MARK into it. The kernel releases the lock
when the process ends, so a marked folder whose lock is free has no owner. Unlike process ids, locks
are never reused.
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
"""Only folders that contain a file of this name are removed."""


@contextmanager
def temporary_folder(prefix: str, parent: Path | None = None) -> Generator[Path]:
    """Create a folder of mode 0700 and remove it on exit. First removes ownerless folders with the
    same prefix.

    Args:
        prefix: prefix of the folder's name.
        parent: existing folder to create it in; defaults to the system's temporary folder.

    Raises:
        OSError: the folder can't be created.
    """
    path, lock = owned_folder(prefix, Path(tempfile.gettempdir()) if parent is None else parent)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def owned_folder(prefix: str, parent: Path, swept: str = "") -> tuple[Path, int]:
    """Like `temporary_folder`, but the caller removes the folder.

    Args:
        prefix: as there.
        parent: existing folder to create it in.
        swept: the prefix of the ownerless folders to remove; empty: `prefix`.

    Returns:
        The folder, and the file descriptor of its lock, which the caller closes after removing the
        folder.

    Raises:
        OSError: the folder can't be created.
    """
    sweep(swept or prefix, parent)
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
    """Remove this user's ownerless folders with this prefix. Folders that can't be removed stay."""
    for path in parent.glob(f"{prefix}*"):
        # not a folder, owned by another user, locked by its owner, or already gone
        with contextlib.suppress(OSError):
            _remove_unowned(path)


def _remove_unowned(path: Path) -> None:
    lock = os.open(path, _FOLDER)
    try:
        if os.fstat(lock).st_uid == os.geteuid() and (path / MARK).exists():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
    finally:
        os.close(lock)
