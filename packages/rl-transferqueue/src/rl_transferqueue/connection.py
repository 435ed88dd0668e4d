"""A link on a reactor: frames in by callback, frames out as the other side takes them."""

from __future__ import annotations

from collections.abc import Callable

from rl_transferqueue.links import Link, LinkClosed
from rl_transferqueue.reactor import Reactor


class Connection:
    """One connection of a server process. Whoever does not read what it is sent is not listened to until it does.

    Lifecycle: open until `close`, or until the other side ends it: then it closes itself and calls `on_closed`.
    """

    def __init__(
        self, reactor: Reactor, link: Link, on_frame: Callable[[bytes], None], on_closed: Callable[[], None]
    ) -> None:
        self._reactor = reactor
        self._link = link
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._open = True
        reactor.watch(link.fileno(), self._read)

    def send(self, frame: bytes) -> None:
        if self._open and not self._link.send(frame):
            self._reactor.watch(self._link.fileno(), self._flush, write=True)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._reactor.unwatch(self._link.fileno())
            self._link.close()

    def _flush(self) -> None:
        if self._link.flush():
            self._reactor.watch(self._link.fileno(), self._read)

    def _read(self) -> None:
        try:
            for frame in self._link.receive():
                self._on_frame(frame)
        except LinkClosed:
            self.close()
            self._on_closed()
