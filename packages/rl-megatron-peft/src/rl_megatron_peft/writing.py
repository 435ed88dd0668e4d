"""Folders that appear whole or not at all: written beside their place and renamed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from rl_protocol.durable import fsync
from rl_protocol.errors import OutputError


def new_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Make a folder with what `write` puts into it, whole or not at all. One that exists is never touched.

    Raises:
        OutputError: `path` exists or can't be written.
    """
    if path.exists():
        raise OutputError(f"{path} exists; only new folders are written. Remove it or choose another.", path=str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{path.name}.", dir=path.parent, ignore_cleanup_errors=True
        ) as scratch:
            folder = Path(scratch) / path.name
            folder.mkdir()
            write(folder)
            folder.rename(path)
        fsync(path.parent)
    except OSError as error:
        raise OutputError(f"{path} can't be written: {error}.", path=str(path)) from error
