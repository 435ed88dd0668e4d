"""Calls that other threads make in the reactor's thread."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable

from rl_transferqueue.transport.event_loop import Reactor


class ReactorCalls:
    """Runs calls in the reactor's thread, in order.

    Lifecycle: until `close`; calls that were not run by then are dropped.

    Args:
        reactor: runs the calls.
    """

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_read, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        reactor.watch(self._wake_read, self._run)

    def post(self, calls: Iterable[Callable[[], None]]) -> None:
        """Have the reactor run these calls; from any thread, before `close`."""
        self._calls.extend(calls)
        os.write(self._wake, b"\0")

    def close(self) -> None:
        """Run no more calls. No thread may post any."""
        self._reactor.unwatch(self._wake_read)
        os.close(self._wake_read)
        os.close(self._wake)

    def _run(self) -> None:
        os.read(self._wake_read, 1 << 16)
        while self._calls:
            self._calls.popleft()()
