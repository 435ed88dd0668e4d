"""Forked processes: one that calls a function, and one that keeps the files of this one open."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Generator
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


def in_a_fork(work: Callable[[], object]) -> str:
    """Run `work` in a forked process; return its error or result as text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = repr(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    try:
        assert select.select([reading], [], [], 60)[0], "the forked process hangs"
        return os.read(reading, 4096).decode()
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
