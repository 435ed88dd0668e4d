"""A connection of a server process: frames in and out on the event loop, within limits."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from rl_transferqueue.transport.connection_limits import TRUSTED, Limits, Stall
from rl_transferqueue.transport.event_loop import Reactor, Timer
from rl_transferqueue.transport.unix_link import LinkClosed, UnixLink

log = logging.getLogger(__name__)


class Connection:
    """One connection, with back-pressure: while the peer does not read, its frames are not handled.

    Lifecycle: open until `close`; if the peer ends it or exceeds a limit, it closes and calls
    `on_closed`, never during `send`: who sends may be in the middle of answering several callers.
    """

    def __init__(
        self,
        reactor: Reactor,
        link: UnixLink,
        on_frame: Callable[[bytes], None],
        on_closed: Callable[[], None],
        limits: Limits,
    ) -> None:
        self._reactor = reactor
        self._link = link
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._limits = limits
        self._received: deque[bytes] = deque()
        """Frames to handle."""
        self._handling = False
        self._stall: Stall | None = None
        """Set while bytes wait to be sent or a frame is incomplete."""
        self._timer: Timer | None = None
        self._open = True
        self._overflowed = False
        """It is about to end: too much waits to be sent."""
        reactor.watch(link.fileno(), self._read)

    def send(self, frame: bytes) -> None:
        if not self._open or self._overflowed or self._link.send(frame):
            return
        self._reactor.watch(self._link.fileno(), self._flush, write=True)
        if self._link.unsent > self._limits.queue_bytes:
            self._overflowed = True
            why = f"{self._link.unsent} bytes wait to be sent to it; the limit is {self._limits.queue_bytes}"
            self._reactor.call_later(0.0, partial(self.end, why))
        else:
            self._look(moved=False)

    def trust(self) -> None:
        """The peer is the controller: use its limits."""
        self._limits = TRUSTED

    def close(self) -> None:
        if self._open:
            self._open = False
            self._reactor.unwatch(self._link.fileno())
            if self._timer is not None:
                self._timer.cancel()
            self._received.clear()
            self._link.close()

    def end(self, why: str) -> None:
        """Close the connection and log the reason."""
        if self._open:
            log.warning("the connection of %s is ended: %s", self._link.peer, why)
            self._closed()

    def _closed(self) -> None:
        self.close()
        self._on_closed()

    def _flush(self) -> None:
        before = self._link.unsent
        if self._link.flush():
            self._reactor.watch(self._link.fileno(), self._read)
        self._look(moved=self._link.unsent < before)
        self._handle()

    def _read(self) -> None:
        try:
            self._received += self._link.receive()
        except LinkClosed:
            self._closed()
            return
        self._handle()
        if self._open and (self._stall is not None or self._link.unfinished):
            self._look(moved=True)

    def _handle(self) -> None:
        """Handle received frames while no answer waits to be sent."""
        if self._handling:  # called by a handler that sends its answer
            return
        self._handling = True
        try:
            while self._received and self._open and not self._link.unsent:
                self._on_frame(self._received.popleft())
        except LinkClosed as error:
            log.warning("the connection of %s is ended: %s", self._link.peer, error)
            self._closed()
        finally:
            self._handling = False

    # -- stalls
    def _look(self, *, moved: bool) -> None:
        """Start or stop the stall timer."""
        if not self._link.unsent and not self._link.partial:
            self._stall = None
            return
        now = time.monotonic()
        if self._stall is None:
            self._stall = Stall(self._limits, now)
        elif moved:
            self._stall.moved(now)
        if self._timer is None:
            self._timer = self._reactor.call_later(self._stall.next_s(now), self._check)

    def _check(self) -> None:
        self._timer = None
        if self._stall is None or not self._open:
            return
        now = time.monotonic()
        due = self._stall.due(now)
        sent, came = self._link.unsent, self._link.partial
        what = f"{sent} bytes wait to be sent to it" if sent else f"it has sent {came} bytes of a frame and stopped"
        if due == "end":
            self.end(f"{what}, for {self._limits.stall_s:g} s")
            return
        if due == "warn":
            log.warning("the connection of %s stalls: %s", self._link.peer, what)
        self._timer = self._reactor.call_later(self._stall.next_s(now), self._check)
