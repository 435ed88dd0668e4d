"""The controller's connection to one storage unit."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rl_protocol.errors import PlaneLostError
from rl_transferqueue.controller.unit_channels import Channel, NetworkChannels, UnixChannels
from rl_transferqueue.transport.event_loop import Reactor
from rl_transferqueue.wire.messages import Answer, Populate, Reply, Request, UnitRequest, pack

_decoder = msgspec.msgpack.Decoder(Reply)
_RETRY_S = 0.01
"""Pause between attempts to connect to a unit that is starting."""


class UnitLink:
    """Sends requests to one storage unit, in order; each answer goes to its callback.

    The unit may start later than this object. When the connection ends, the unit has ended.
    """

    def __init__(
        self,
        reactor: Reactor,
        channels: UnixChannels | NetworkChannels,
        segment: int,
        on_connected: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._reactor = reactor
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._channels = channels
        self._segment = segment
        self._populated = segment
        self._connection: Channel | None = None
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
        """Have the unit touch its memory some way beyond the first `used` bytes."""
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
            self._connection = self._channels.open(self._take, self._on_lost)
        except PlaneLostError:
            self._reactor.call_later(_RETRY_S, self._connect)
            return
        for frame in self._unsent:
            self._connection.send(frame)
        self._on_connected()

    def _take(self, frame: bytes) -> None:
        reply = _decoder.decode(frame)
        callback = self._callbacks.pop(reply.id, None)
        if callback is not None:
            callback(reply.body)
