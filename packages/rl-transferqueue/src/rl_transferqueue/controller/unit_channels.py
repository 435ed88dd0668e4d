"""How the controller reaches a storage unit: over a unix socket, or over the network."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from rl_transferqueue.transport.bulk_client import dial
from rl_transferqueue.transport.bulk_protocol import HANDSHAKE_S, SESSION_BYTES
from rl_transferqueue.transport.connection import Connection
from rl_transferqueue.transport.connection_limits import TRUSTED
from rl_transferqueue.transport.event_loop import Reactor
from rl_transferqueue.transport.plane_secret import PlaneKey
from rl_transferqueue.transport.unix_link import connect_unix
from rl_transferqueue.transport.zmq_link import ZmqLink
from rl_transferqueue.wire.descriptor import UnitAddress
from rl_transferqueue.wire.messages import CONTROLLER

OnFrame = Callable[[bytes], None]
OnClosed = Callable[[], None]


class Channel(Protocol):
    """Frames to and from one storage unit."""

    def send(self, frame: bytes) -> None:
        """Send a frame, without waiting."""
        ...

    def close(self) -> None:
        """End it, without calling back."""
        ...


class UnixChannels:
    """Makes channels to a unit of this host, which may still be starting."""

    def __init__(self, reactor: Reactor, address: str) -> None:
        self._reactor = reactor
        self._address = address

    def open(self, on_frame: OnFrame, on_closed: OnClosed) -> Channel:
        """A channel that calls back with each frame, and when the unit has ended.

        Raises:
            PlaneLostError: the unit does not run, or not yet.
        """
        link = connect_unix(self._address, CONTROLLER, "storage unit")
        return Connection(self._reactor, link, on_frame, on_closed, TRUSTED)


class NetworkChannels:
    """Makes channels to a running unit of another host: messages over ZeroMQ, and an idle bulk
    connection, which ends with the unit.

    It connects at once, and waits for the unit's part of the handshake.

    Raises:
        PlaneLostError, PlaneTimeout, ConfigError: see `dial`.
    """

    def __init__(self, reactor: Reactor, unit: UnitAddress, name: str, key: PlaneKey) -> None:
        self._reactor = reactor
        self._unit = unit
        self._key = key
        self._lifeline = dial(unit, unit.host, name, key, CONTROLLER[:SESSION_BYTES], HANDSHAKE_S).lifeline()

    def open(self, on_frame: OnFrame, on_closed: OnClosed) -> Channel:
        """As for a unit of this host; at most once."""
        link = ZmqLink(self._unit.control, CONTROLLER, self._key)
        return _NetworkChannel(self._reactor, link, self._lifeline, on_frame, on_closed)


class _NetworkChannel(Channel):
    def __init__(self, reactor: Reactor, link: ZmqLink, lifeline: int, on_frame: OnFrame, on_closed: OnClosed) -> None:
        self._reactor = reactor
        self._link = link
        self._lifeline = lifeline
        self._on_frame = on_frame
        reactor.watch(link.socket, self._read)
        reactor.watch(lifeline, on_closed)

    def send(self, frame: bytes) -> None:
        self._link.send(frame)

    def close(self) -> None:
        self._reactor.unwatch(self._link.socket)
        self._reactor.unwatch(self._lifeline)
        os.close(self._lifeline)
        self._link.close()

    def _read(self) -> None:
        for frame in self._link.receive():
            self._on_frame(frame)
