"""The controller's line to one storage unit."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rl_protocol.errors import PlaneLostError
from rl_transferqueue.connection import Connection
from rl_transferqueue.limits import TRUSTED
from rl_transferqueue.links import connect_unix
from rl_transferqueue.messages import CONTROLLER, Answer, Populate, Reply, Request, UnitRequest, pack
from rl_transferqueue.reactor import Reactor

_decoder = msgspec.msgpack.Decoder(Reply)
_RETRY_S = 0.01
"""Between attempts to reach a storage unit that starts at the same time."""


class UnitLink:
    """Requests to one storage unit, in order; answers go to the callback given with each. The unit may come up later than this.

    The end of the connection is the end of the unit.
    """

    def __init__(
        self,
        reactor: Reactor,
        address: str,
        segment: int,
        on_connected: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._reactor = reactor
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._address = address
        self._segment = segment
        self._populated = segment
        self._connection: Connection | None = None
        self._unsent: list[bytes] = []
        self._callbacks: dict[int, Callable[[Answer], None]] = {}
        self._last = 0
        self._closed = False
        reactor.call_later(0.0, self._connect)

    @property
    def connected(self) -> bool:
        return self._connection is not None

    def send(self, body: UnitRequest, callback: Callable[[Answer], None] | None = None) -> None:
        self._last += 1
        if callback is not None:
            self._callbacks[self._last] = callback
        frame = pack(Request(self._last, body))
        if self._connection is None:
            self._unsent.append(frame)
        else:
            self._connection.send(frame)

    def keep_ahead(self, used: int) -> None:
        """Have the memory touched some way beyond the first `used` bytes."""
        if used + self._segment > self._populated:
            self._populated = used + 2 * self._segment
            self.send(Populate(self._populated))

    def close(self) -> None:
        self._closed = True
        if self._connection is not None:
            self._connection.close()

    def _connect(self) -> None:
        if self._closed:
            return
        try:
            link = connect_unix(self._address, CONTROLLER, "storage unit")
        except PlaneLostError:
            self._reactor.call_later(_RETRY_S, self._connect)
            return
        self._connection = Connection(self._reactor, link, self._take, self._on_lost, TRUSTED)
        for frame in self._unsent:
            self._connection.send(frame)
        self._on_connected()

    def _take(self, frame: bytes) -> None:
        reply = _decoder.decode(frame)
        callback = self._callbacks.pop(reply.id, None)
        if callback is not None:
            callback(reply.body)
