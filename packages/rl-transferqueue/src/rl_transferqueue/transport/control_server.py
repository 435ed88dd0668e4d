"""The server's side of the control protocol: one socket and a table of handlers."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import msgspec

from rl_protocol.errors import UNREADABLE, BatchError, RLError, WireError
from rl_transferqueue.transport.connection import Connection
from rl_transferqueue.transport.connection_limits import DEFAULT, Limits
from rl_transferqueue.transport.event_loop import Reactor
from rl_transferqueue.transport.listener import Listener
from rl_transferqueue.transport.plane_secret import PlaneKey
from rl_transferqueue.transport.request_counters import RequestCounters
from rl_transferqueue.transport.unix_link import LinkClosed, UnixLink, listen_unix
from rl_transferqueue.transport.zmq_router import ZmqRouter
from rl_transferqueue.wire.failures import failure
from rl_transferqueue.wire.messages import CONTROLLER, Answer, LinkBytes, Reply, Request, pack

log = logging.getLogger(__name__)

_IDENTITY = 64
"""Longest identity of a session in bytes."""


class Caller(NamedTuple):
    """A session and its request: where an answer goes."""

    session: bytes
    request: int


Handler: TypeAlias = Callable[[Caller, Any], Answer | None]
"""Returns the answer to a message, or None if `Server.answer` sends it later.

An RLError that it raises becomes the answer.
"""


class _OnlyId(msgspec.Struct, array_like=True):
    id: int


_decoder = msgspec.msgpack.Decoder(Request)
_id_decoder = msgspec.msgpack.Decoder(_OnlyId)


class Server:
    """Reads requests and answers them.

    Unreadable frames are counted and answered with WireError.
    """

    def __init__(
        self,
        reactor: Reactor,
        address: str,
        handlers: Mapping[type, Handler],
        *,
        on_received: Callable[[bytes, Sequence[int]], None] | None = None,
        on_end: Callable[[bytes], None] = lambda _: None,
        limits: Limits = DEFAULT,
        incarnation: int = 0,
    ) -> None:
        """`on_received` is called with a session and its requests whose answers have reached their
        callers, `on_end` with a session whose connection has ended. `incarnation` is that of this
        controller, 0: this server is none.
        """
        self._reactor = reactor
        self._handlers = handlers
        self._on_received = on_received
        self._on_end = on_end
        self._limits = limits
        self._incarnation = incarnation
        self._peers: dict[bytes, Connection] = {}
        self._strangers: set[Connection] = set()
        """Connections that have not sent their first frame."""
        self._router: ZmqRouter | None = None
        """For clients of other hosts."""
        self.undecodable = 0
        self.counters = RequestCounters()
        self.links = LinkBytes()
        """What all clients have moved."""
        self._listener = Listener(reactor, listen_unix(address), self._accept)

    def listen(self, host: str, key: PlaneKey, port: int = 0) -> str:
        """Also serve other hosts on this address and port (0: any free one); returns the
        endpoint."""
        self._router = ZmqRouter(
            self._reactor, host, port, key, self._take_remote, self._on_end, self._limits, self._incarnation
        )
        return self._router.endpoint

    def answer(self, caller: Caller, body: Answer) -> None:
        """Send an answer; a caller that is gone gets nothing."""
        try:
            frame = pack(Reply(caller.request, body))
        except BatchError as error:
            frame = pack(Reply(caller.request, failure(error)))
        self.counters.bytes_sent += len(frame)
        peer = self._peers.get(caller.session)
        if peer is not None:
            peer.send(frame)
        elif self._router is not None:
            self._router.send(caller.session, frame)

    def fail(self, caller: Caller, error: RLError) -> None:
        self.counters.failed(error)
        self.answer(caller, failure(error))

    def close(self) -> None:
        for peer in (*self._peers.values(), *self._strangers):
            peer.close()
        self._listener.close()
        if self._router is not None:
            self._router.close()

    # -- connections
    def _accept(self, accepted: socket.socket) -> None:
        session = b""

        def take(frame: bytes) -> None:
            nonlocal session
            if session:
                late.cancel()
                self._dispatch(session, frame)
                return
            if frame in self._peers or not 0 < len(frame) <= _IDENTITY:
                raise LinkClosed("another connection has this identity, or it is none")
            session = frame
            self._strangers.discard(peer)
            self._peers[session] = peer
            if session == CONTROLLER:
                late.cancel()
                peer.trust()

        def closed() -> None:
            late.cancel()
            self._strangers.discard(peer)
            if session:
                del self._peers[session]
                self._on_end(session)

        limits = self._limits
        peer = Connection(self._reactor, UnixLink(accepted), take, closed, limits)
        self._strangers.add(peer)
        why = f"it has not said who it is and what it asks for within {limits.handshake_s:g} s"
        late = self._reactor.call_later(limits.handshake_s, partial(peer.end, why))

    def _take_remote(self, session: bytes, frame: bytes) -> None:
        if session not in self._peers:
            self._dispatch(session, frame)

    # -- requests
    def _dispatch(self, session: bytes, frame: bytes) -> None:
        began = time.perf_counter_ns()
        try:
            request = _decoder.decode(frame)
        except UNREADABLE as error:
            self.undecodable += 1
            log.warning("frame %d that can't be read, from session %s: %s", self.undecodable, session.hex(), error)
            self.fail(Caller(session, _id_of(frame)), WireError(f"The request can't be read: {error}."))
            return
        caller = Caller(session, request.id)
        if request.received and self._on_received is not None:
            self._on_received(session, request.received)
        if request.moved is not None:
            self.links += request.moved
        handler = self._handlers.get(type(request.body))
        try:
            if handler is None:
                raise WireError(f"This server does not serve {type(request.body).__name__}.")
            body = handler(caller, request.body)
        except RLError as error:
            self.fail(caller, error)
        else:
            if body is not None:
                self.answer(caller, body)
        self.counters.served(type(request.body).__name__, time.perf_counter_ns() - began, len(frame))


def _id_of(frame: bytes) -> int:
    try:
        found = _id_decoder.decode(frame).id
    except UNREADABLE:
        return 0
    return found if 0 <= found < 1 << 62 else 0
