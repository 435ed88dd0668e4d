"""The loop of a server process: ZeroMQ sockets, file descriptors and timers, one thread, nothing blocks but the poll itself."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable

import zmq

Source = zmq.Socket[bytes] | int


class Timer:
    """A callback at a time; `cancel` makes it do nothing."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Reactor:
    """Calls back until `stop`; callbacks must return soon. `idle` runs when nothing else is to do and says whether it has more work."""

    def __init__(self, idle: Callable[[], bool] | None = None) -> None:
        self._poller = zmq.Poller()
        self._callbacks: dict[object, Callable[[], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._timers_made = 0
        self._idle = idle
        self._running = True

    def watch(self, source: Source, callback: Callable[[], None], *, write: bool = False) -> None:
        """Call back while the source can be read, or with `write` written (or has ended); replaces what was said before of the source."""
        self._poller.register(source, zmq.POLLOUT if write else zmq.POLLIN)
        self._callbacks[source] = callback

    def unwatch(self, source: Source) -> None:
        self._poller.unregister(source)
        del self._callbacks[source]

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(callback)
        self._timers_made += 1
        heapq.heappush(self._timers, (time.monotonic() + seconds, self._timers_made, timer))
        return timer

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        busy = self._idle is not None
        while self._running:
            ready = self._poller.poll(0 if busy else self._until_next_timer())
            due = [(source, self._callbacks[source]) for source, _ in ready]
            for source, callback in due:
                if (
                    self._callbacks.get(source) is callback
                ):  # not so if an earlier one unwatched it and its number is in use again
                    callback()
            self._fire()
            if self._idle is not None and (busy or ready):
                busy = self._idle() if not ready else True

    def _until_next_timer(self) -> int | None:
        """Milliseconds, rounded up; None: no timer."""
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        return max(0, min(int((self._timers[0][0] - time.monotonic()) * 1000) + 1, 1 << 30))

    def _fire(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            callback = heapq.heappop(self._timers)[2].callback
            if callback is not None:
                callback()
