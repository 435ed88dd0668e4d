"""A forked process that lives as long as a block, and keeps the files of this one open."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def forked() -> Generator[None]:
    """Fork a process that does nothing until the end of the block."""
    waiting, ends = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ends)
        os.read(waiting, 1)
        os._exit(0)
    os.close(waiting)
    try:
        yield
    finally:
        os.close(ends)
        os.waitpid(child, 0)
