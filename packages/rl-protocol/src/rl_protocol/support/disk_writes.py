"""fsync helpers and disk-error messages."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from rl_protocol.errors import OutputError


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def write_errors(path: Path, what: str, remedy: str) -> Generator[None]:
    """Turn an OSError of a write into an OutputError that names what, where, why and the remedy.

    An OutputError from within passes unchanged.
    """
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        message = f"{what} can't be written to {path}: {error.strerror or error}. {remedy}"
        raise OutputError(message, path=str(path)) from error
