"""Wait for many file descriptors: epoll on Linux, poll elsewhere."""

from __future__ import annotations

import os
import select
import time
from math import ceil
from typing import Protocol

from rl_protocol.support.host.portable import uses_linux


class Poll(Protocol):
    """What epoll and poll share; events are those of poll, which epoll has with the same values."""

    def register(self, fd: int, eventmask: int) -> None: ...

    def modify(self, fd: int, eventmask: int) -> None: ...

    def unregister(self, fd: int) -> None: ...

    def poll(self, timeout: float | None) -> list[tuple[int, int]]:
        """Descriptors with events; waits so many seconds, None: without limit."""
        ...


def poller() -> Poll:
    """A new one without descriptors."""
    return select.epoll() if uses_linux() else _PortablePoll()


def yield_processor() -> None:
    """Let other threads and processes compute."""
    if uses_linux():
        os.sched_yield()
    else:
        time.sleep(0)


class _PortablePoll:
    def __init__(self) -> None:
        self._poll = select.poll()

    def register(self, fd: int, eventmask: int) -> None:
        self._poll.register(fd, eventmask)

    def modify(self, fd: int, eventmask: int) -> None:
        self._poll.modify(fd, eventmask)

    def unregister(self, fd: int) -> None:
        self._poll.unregister(fd)

    def poll(self, timeout: float | None) -> list[tuple[int, int]]:
        return self._poll.poll(None if timeout is None else ceil(timeout * 1000))
