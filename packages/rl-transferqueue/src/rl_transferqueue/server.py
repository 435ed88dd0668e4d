"""The serving end of the control protocol: one listening socket, one table of handlers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import msgspec

from rl_protocol.errors import BatchError, RLError, WireError
from rl_transferqueue.connection import Connection
from rl_transferqueue.links import LinkClosed, accept, listen_unix
from rl_transferqueue.messages import Answer, Reply, Request, failure, pack
from rl_transferqueue.reactor import Reactor

log = logging.getLogger(__name__)

_IDENTITY = 64
"""Longest name of a session in bytes."""


class Caller(NamedTuple):
    """Who asked, and for what: where the answer goes."""

    session: bytes
    request: int


Handler: TypeAlias = Callable[[Caller, Any], Answer | None]
"""Answers a message; None: an answer comes later through `Server.answer`. An RLError becomes the answer."""


class _OnlyId(msgspec.Struct, array_like=True):
    id: int


_decoder = msgspec.msgpack.Decoder(Request)
_id_decoder = msgspec.msgpack.Decoder(_OnlyId)


class Server:
    """Reads requests and answers them. Frames that can't be read are counted, answered with WireError, and harm nobody else."""

    def __init__(self, reactor: Reactor, address: str, handlers: Mapping[type, Handler]) -> None:
        self._reactor = reactor
        self._handlers = handlers
        self._listener = listen_unix(address)
        self._peers: dict[bytes, Connection] = {}
        self._strangers: set[Connection] = set()
        """Connections that have not sent their first frame."""
        self.undecodable = 0
        reactor.watch(self._listener.fileno(), self._accept)

    def answer(self, caller: Caller, body: Answer) -> None:
        """Send an answer; a caller that is gone gets nothing."""
        peer = self._peers.get(caller.session)
        if peer is None:
            return
        try:
            frame = pack(Reply(caller.request, body))
        except BatchError as error:
            frame = pack(Reply(caller.request, failure(error)))
        peer.send(frame)

    def fail(self, caller: Caller, error: RLError) -> None:
        self.answer(caller, failure(error))

    def close(self) -> None:
        for peer in (*self._peers.values(), *self._strangers):
            peer.close()
        self._listener.close()

    # -- connections
    def _accept(self) -> None:
        link = accept(self._listener)
        if link is None:
            return
        session: bytes | None = None

        def take(frame: bytes) -> None:
            nonlocal session
            if session is None:
                if frame in self._peers or not 0 < len(frame) <= _IDENTITY:
                    raise LinkClosed("another connection has this identity, or it is none")
                session = frame
                self._strangers.discard(peer)
                self._peers[session] = peer
            else:
                self._dispatch(session, frame)

        def closed() -> None:
            self._strangers.discard(peer)
            if session is not None:
                del self._peers[session]

        peer = Connection(self._reactor, link, take, closed)
        self._strangers.add(peer)

    # -- requests
    def _dispatch(self, session: bytes, frame: bytes) -> None:
        try:
            request = _decoder.decode(frame)
        except (msgspec.DecodeError, RecursionError) as error:
            self.undecodable += 1
            log.warning("frame %d that can't be read, from session %s: %s", self.undecodable, session.hex(), error)
            self.fail(Caller(session, _id_of(frame)), WireError(f"The request can't be read: {error}."))
            return
        caller = Caller(session, request.id)
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


def _id_of(frame: bytes) -> int:
    try:
        found = _id_decoder.decode(frame).id
    except (msgspec.DecodeError, RecursionError):
        return 0
    return found if 0 <= found < 1 << 62 else 0
