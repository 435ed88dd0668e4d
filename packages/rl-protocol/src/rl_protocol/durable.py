"""What must be on the disk before something else is, and what is said when it can't be."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from rl_protocol.errors import OutputError


def fsync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def write_errors(path: Path, what: str, remedy: str) -> Generator[None]:
    """Turn a failing write into an OutputError that says what can't be written, where, why, and the remedy; one that has been said stays."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"{what} can't be written to {path}: {error.strerror or error}. {remedy}") from error
