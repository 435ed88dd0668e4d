"""Folders that appear whole or not at all: written beside their place and renamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rl_protocol.durable import fsync
from rl_protocol.errors import OutputError
from rl_protocol.temporary import temporary_folder


def new_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Make a folder with what `write` puts into it, whole or not at all. One that exists is never touched.

    Raises:
        OutputError: `path` exists or can't be written.
    """
    if path.exists():
        raise OutputError(f"{path} exists; only new folders are written. Remove it or choose another.", path=str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(".unfinished-", path.parent) as scratch:
            folder = scratch / path.name
            folder.mkdir()
            write(folder)
            folder.rename(path)
        fsync(path.parent)
    except OSError as error:
        raise OutputError(f"{path} can't be written: {error}.", path=str(path)) from error
