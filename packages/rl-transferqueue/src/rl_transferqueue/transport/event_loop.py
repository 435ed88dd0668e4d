"""The event loop of a server process: file descriptors, ZeroMQ sockets and timers in one thread."""

from __future__ import annotations

import heapq
import select
import time
from collections.abc import Callable

import zmq

from rl_protocol.support.host.readiness import Poll, poller, yield_processor
from rl_transferqueue.transport.unix_link import LOOK_S

Source = zmq.Socket[bytes] | int


_CANCELLED = 64
"""Cancelled timers that may be kept in any case."""


class Timer:
    """A callback at a point in time; after `cancel` it does nothing."""

    __slots__ = ("callback", "on_cancel")

    def __init__(self, callback: Callable[[], None], on_cancel: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback
        self.on_cancel = on_cancel

    def cancel(self) -> None:
        if self.callback is not None:
            self.callback = None
            self.on_cancel()


class Reactor:
    """Runs callbacks, which must not block, until `stop`.

    Args:
        idle: runs when there is nothing else to do; returns whether it has more work.
    """

    def __init__(self, idle: Callable[[], bool] | None = None) -> None:
        self._poll: Poll = poller()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._zmq: dict[int, zmq.Socket[bytes]] = {}
        """ZeroMQ sockets by descriptor.

        It is edge-triggered, so the sockets are polled before each wait.
        """
        self._timers: list[tuple[float, int, Timer]] = []
        self._timers_made = 0
        self._cancelled = 0
        """Approximate number of cancelled timers in `_timers`."""
        self._idle = idle
        self._running = True
        self._look_until = 0.0

    def watch(self, source: Source, callback: Callable[[], None], *, write: bool = False) -> None:
        """Call back while the source can be read (`write`: written) or has ended.

        Replaces an earlier callback of the source.
        """
        number = self._number(source)
        if isinstance(source, zmq.Socket):
            self._zmq[number] = source
        wanted = select.POLLOUT if write else select.POLLIN
        if number in self._callbacks:
            self._poll.modify(number, wanted)
        else:
            self._poll.register(number, wanted)
        self._callbacks[number] = callback

    def unwatch(self, source: Source) -> None:
        number = self._number(source)
        self._poll.unregister(number)
        self._zmq.pop(number, None)
        del self._callbacks[number]

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(callback, self._count_cancelled)
        self._timers_made += 1
        heapq.heappush(self._timers, (time.monotonic() + seconds, self._timers_made, timer))
        return timer

    def _count_cancelled(self) -> None:
        """Most timers are deadlines that are cancelled: drop those once they are the majority."""
        self._cancelled += 1
        if self._cancelled > max(_CANCELLED, len(self._timers) // 2):
            self._timers = [entry for entry in self._timers if entry[2].callback is not None]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        busy = self._idle is not None
        while self._running:
            waiting = self._waiting() if self._zmq else []
            ready = self._ready_now() if busy or waiting else self._ready()
            for number, callback in [(n, self._callbacks[n]) for n in dict.fromkeys((*waiting, *ready))]:
                if (
                    self._callbacks.get(number) is callback
                ):  # else an earlier callback unwatched it and the number was reused
                    callback()
            if ready:
                self._look_until = time.monotonic() + LOOK_S
            self._fire()
            if self._idle is not None and (busy or ready):
                busy = self._idle() if not ready else True

    def _waiting(self) -> list[int]:
        """ZeroMQ sockets that have messages."""
        return [number for number, socket in self._zmq.items() if int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN]

    def _ready_now(self) -> list[int]:
        return [number for number, _ in self._poll.poll(0)]

    def _ready(self) -> list[int]:
        """Wait for a ready source or the next timer; polls for a while before it sleeps."""
        while not (ready := self._ready_now()) and time.monotonic() < self._look_until:
            yield_processor()
        return ready or [number for number, _ in self._poll.poll(self._until_next_timer())]

    @staticmethod
    def _number(source: Source) -> int:
        return int(source.getsockopt(zmq.FD)) if isinstance(source, zmq.Socket) else source

    def _until_next_timer(self) -> float | None:
        """Seconds; None: no timer."""
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        return max(0.0, min(self._timers[0][0] - time.monotonic(), 1e6))

    def _fire(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()
