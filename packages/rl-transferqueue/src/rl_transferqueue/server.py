"""The serving end of the control protocol: one ROUTER socket, one table of handlers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import msgspec
import zmq

from rl_protocol.errors import UNREADABLE, BatchError, RLError, WireError
from rl_transferqueue.hosts import endpoint
from rl_transferqueue.keys import PlaneKey
from rl_transferqueue.messages import MAX_FRAME, Answer, Reply, Request, failure, pack
from rl_transferqueue.reactor import Reactor
from rl_transferqueue.tally import ServerTally

log = logging.getLogger(__name__)

_BURST = 64
"""Frames read in a row before timers and other sources get a turn."""


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

    def __init__(
        self, reactor: Reactor, context: zmq.Context[zmq.Socket[bytes]], address: str, handlers: Mapping[type, Handler]
    ) -> None:
        self._handlers = handlers
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)  # before `listen`: only the endpoints bound after it ask for a key
        self.undecodable = 0
        self.tally = ServerTally()
        reactor.watch(self._socket, self._read)

    def listen(self, host: str, key: PlaneKey) -> str:
        """Also serve other hosts, at an address of this one and a port that is free; returns the endpoint."""
        key.protect_server(self._socket)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        self._socket.bind(f"tcp://{endpoint(host, '*')}")
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def answer(self, caller: Caller, body: Answer) -> None:
        """Send an answer; a caller that is gone gets nothing."""
        try:
            frame = pack(Reply(caller.request, body))
        except BatchError as error:
            frame = pack(Reply(caller.request, failure(error)))
        self.tally.bytes_sent += len(frame)
        self._socket.send_multipart([caller.session, frame], zmq.DONTWAIT)

    def fail(self, caller: Caller, error: RLError) -> None:
        self.tally.failed(error)
        self.answer(caller, failure(error))

    def close(self) -> None:
        self._socket.close()

    def _read(self) -> None:
        for _ in range(_BURST):
            try:
                session, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._dispatch(session, frames)

    def _dispatch(self, session: bytes, frames: list[bytes]) -> None:
        began = time.perf_counter_ns()
        try:
            request = _decoder.decode(b"" if len(frames) != 1 else frames[0])
        except UNREADABLE as error:
            self.undecodable += 1
            log.warning("frame %d that can't be read, from session %s: %s", self.undecodable, session.hex(), error)
            self.fail(Caller(session, _id_of(frames)), WireError(f"The request can't be read: {error}."))
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
        self.tally.served(type(request.body).__name__, time.perf_counter_ns() - began, len(frames[0]))


def _id_of(frames: list[bytes]) -> int:
    try:
        found = _id_decoder.decode(frames[0]).id if len(frames) == 1 else 0
    except UNREADABLE:
        return 0
    return found if 0 <= found < 1 << 62 else 0
