"""The server's side of bulk connections, on the event loop of a server process.

Nothing blocks, and only the loop's thread touches the arena. Each connection is a generator that
yields what to move next: a buffer to fill or buffers to send.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import TypeAlias

import msgspec
import numpy as np

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.errors import UNREADABLE, RLError, WireError
from rl_protocol.support.host.tcp_peers import notice_dead_peer
from rl_protocol.support.host_identity import this_host
from rl_protocol.support.shared_secret import PROOF_BYTES
from rl_protocol.wire import encode, read_payload
from rl_transferqueue.transport.bulk_protocol import (
    CHUNK,
    INTRODUCTION_BYTES,
    MAGIC,
    NONCE_BYTES,
    SESSION_BYTES,
    BulkRequest,
    Outgoing,
    ReadBlock,
    ReadRows,
    Refused,
    Sending,
    WantedPiece,
    WriteBlock,
    Written,
    as_lifeline,
    client_proof,
    frame,
    frame_length,
    server_proof,
)
from rl_transferqueue.transport.connection_limits import DEFAULT, Limits, Stall
from rl_transferqueue.transport.event_loop import Reactor
from rl_transferqueue.transport.listener import Listener
from rl_transferqueue.transport.plane_secret import PlaneKey
from rl_transferqueue.wire.arrays import Ints
from rl_transferqueue.wire.failures import failure
from rl_transferqueue.wire.header_cache import unpack_header
from rl_transferqueue.wire.messages import Fence
from rl_transferqueue.wire.process_liveness import this_process
from rl_transferqueue.wire.spans import Span

log = logging.getLogger(__name__)

_BACKLOG = 1024
_TURN_BYTES = 4 << 20
"""Bytes moved in a row before other connections and control messages get a turn."""
_SCRATCH_BYTES = 1 << 16
_FENCES = 64
"""Abandoned spans that are remembered per session, to refuse late writes to them."""
_BARRED = 1 << 16
"""Ended sessions that are remembered, to refuse their late connections."""

Step: TypeAlias = memoryview | Outgoing
Script: TypeAlias = Generator[Step, None, None]
_decoder = msgspec.msgpack.Decoder[BulkRequest](BulkRequest)


class Connection:
    """One connection and its generator; ends with the generator, the peer, or an error of
    either."""

    def __init__(self, reactor: Reactor, peer: socket.socket, limits: Limits) -> None:
        self.session = b""
        """Empty until the handshake is over."""
        self.idle = False
        """Whether no request is under way; its end is set by the first byte of the next one."""
        self.into = range(0)
        """Bytes of the arena that a payload is arriving for."""
        self._reactor = reactor
        self._peer = peer
        self._script: Script | None = None
        self._step: Step = memoryview(b"")
        self._on_end: Callable[[Connection], None] = lambda _: None
        self._stall = Stall(limits, time.monotonic())
        self._timer = reactor.call_later(limits.warn_s, self._look)

    def start(self, script: Script, on_end: Callable[[Connection], None]) -> None:
        self._script, self._on_end = script, on_end
        self._step = next(script)
        self._reactor.watch(self._peer.fileno(), self._turn, write=isinstance(self._step, Outgoing))

    def end(self) -> None:
        """Close it; safe to call twice."""
        if self._script is not None:
            self.leave().close()

    def leave(self) -> socket.socket:
        """Stop serving and hand the socket over."""
        assert self._script is not None
        self._script = None
        self._timer.cancel()
        self._reactor.unwatch(self._peer.fileno())
        self._on_end(self)
        return self._peer

    def _turn(self) -> None:
        try:
            self._move()
        except (OSError, WireError, StopIteration) as error:
            if self.session and not isinstance(error, StopIteration | ConnectionError):
                log.warning("bulk connection of session %s ends: %s", self.session.hex(), error)
            self.end()

    def _look(self) -> None:
        """End a connection on which nothing moves in the middle of a request."""
        now = time.monotonic()
        if self.idle or not self.session:  # the handshake has its own deadline
            self._stall.moved(now)
        due = self._stall.due(now)
        if due is not None:
            done = "is ended" if due == "end" else "stalls"
            log.warning("bulk connection of session %s %s in the middle of a transfer", self.session.hex(), done)
        if due == "end":
            self.end()
        else:
            self._timer = self._reactor.call_later(self._stall.next_s(now), self._look)

    def _move(self) -> None:
        left = _TURN_BYTES
        self._stall.moved(time.monotonic())
        while left > 0 and self._script is not None:
            try:
                moved = self._once()
            except BlockingIOError:
                return
            left -= max(moved, _SCRATCH_BYTES)
            if not self._step:
                wrote = isinstance(self._step, Outgoing)
                self._step = next(self._script)
                if isinstance(self._step, Outgoing) is not wrote:
                    self._reactor.watch(self._peer.fileno(), self._turn, write=not wrote)

    def _once(self) -> int:
        if isinstance(self._step, Outgoing):
            return self._step.send(self._peer)
        got = self._peer.recv_into(self._step[:CHUNK])
        if not got:
            raise ConnectionResetError("the peer has closed")
        self.idle = False
        self._step = self._step[got:]
        return got


class BulkServer:
    """Accepts connections and serves the arena of a unit.

    A controller has no arena: its connections only show which clients live.
    """

    def __init__(
        self,
        reactor: Reactor,
        host: str,
        key: PlaneKey,
        arena: memoryview | None = None,
        port: int = 0,
        limits: Limits = DEFAULT,
    ) -> None:
        self._reactor = reactor
        self._limits = limits
        self._key = key
        self._arena = arena
        self._incarnation = 1
        """Of the controller to which the arena belongs."""
        self._connections: set[Connection] = set()
        self._barred: dict[bytes, None] = {}
        """Sessions of other hosts that have ended, the last ones."""
        self._abandoned: dict[bytes, deque[tuple[Span, int]]] = {}
        """What each session abandoned last, and how many spans it had abandoned then."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self.port = int(listening.getsockname()[1])
        self._listener = Listener(reactor, listening, self._accept)

    def close(self) -> None:
        """End everything."""
        self._listener.close()
        for connection in list(self._connections):
            connection.end()

    def claim(self, session: bytes) -> int | None:
        """Take a connection of the session as a lifeline; the caller closes its file descriptor."""
        for connection in self._connections:
            if connection.session == session:
                return as_lifeline(connection.leave())
        return None

    def renew(self, arena: memoryview, incarnation: int) -> None:
        """Serve another arena, which belongs to a later controller. Transfers under way end in the
        old one; later requests that name an earlier controller are refused."""
        self._arena, self._incarnation = arena, incarnation
        self._abandoned.clear()

    def fence(self, fence: Fence) -> None:
        """End writes of a session to spans, and refuse late ones that began before it abandoned
        them.

        Of a session that has ended all connections end, and no more are let in.
        """
        if fence.ended:
            self._barred[fence.session] = None
            if len(self._barred) > _BARRED:
                del self._barred[next(iter(self._barred))]
            self._abandoned.pop(fence.session, None)
        else:
            late = self._abandoned.setdefault(fence.session, deque(maxlen=_FENCES))
            late.extend((span, fence.serial) for span in fence.spans)
        for connection in list(self._connections):
            meant = fence.ended or any(_meet(connection.into, span) for span in fence.spans)
            if connection.session == fence.session and meant:
                connection.end()

    # -- inner
    def _accept(self, peer: socket.socket) -> None:
        notice_dead_peer(peer)
        connection = Connection(self._reactor, peer, self._limits)
        self._connections.add(connection)
        late = self._reactor.call_later(self._limits.handshake_s, connection.end)

        def ended(connection: Connection) -> None:
            late.cancel()
            self._connections.discard(connection)

        def script() -> Script:
            yield from self._shake_hands(connection)
            late.cancel()
            yield from self._serve(connection)

        connection.start(script(), ended)

    def _shake_hands(self, connection: Connection) -> Script:
        mine = os.urandom(NONCE_BYTES)
        yield Outgoing([MAGIC + mine])
        said = bytearray(INTRODUCTION_BYTES)
        yield memoryview(said)
        session, theirs = bytes(said[:SESSION_BYTES]), bytes(said[SESSION_BYTES:-PROOF_BYTES])
        identity = (self._key, this_host(), this_process(), mine + theirs, session)
        if session in self._barred or not hmac.compare_digest(said[-PROOF_BYTES:], client_proof(*identity)):
            log.warning(
                "a bulk connection was refused: it does not know the key of this plane, or meant another process"
            )
            yield Outgoing([bytes(1 + PROOF_BYTES)])
            return
        connection.session = session
        yield Outgoing([b"\x01" + server_proof(*identity)])

    def _serve(self, connection: Connection) -> Script:
        while connection.session:
            head = bytearray(4)
            connection.idle = True
            yield memoryview(head)
            left, packed = frame_length(head), bytearray()
            while left:  # in pieces: memory for what has come, not for what was announced
                piece = bytearray(min(left, CHUNK))
                yield memoryview(piece)
                packed += piece
                left -= len(piece)
            try:
                request = _decoder.decode(packed)
            except UNREADABLE as error:
                raise WireError(f"The request can't be read: {error}.") from error
            if isinstance(request, WriteBlock):
                yield from self._receive(connection, request)
            else:
                yield Outgoing(self._answer(request))

    def _receive(self, connection: Connection, request: WriteBlock) -> Script:
        if request.incarnation != self._incarnation:
            yield from self._discard(request.nbytes)
            yield Outgoing([frame(Refused(self._incarnation))])
            return
        arena, stop = self._arena, request.offset + request.nbytes
        if arena is None or stop > len(arena):
            yield from self._discard(request.nbytes)
            yield Outgoing([frame(failure(WireError(f"There are no bytes {request.offset} to {stop} here.")))])
            return
        into = range(request.offset, stop)
        for span, serial in self._abandoned.get(connection.session, ()):
            if request.serial < serial and _meet(into, span):
                raise WireError(f"Bytes {request.offset} to {stop} were abandoned by this session.")
        connection.into = into
        if request.nbytes:
            yield arena[request.offset : stop]
        connection.into = range(0)
        yield Outgoing([frame(Written())])

    def _discard(self, nbytes: int) -> Script:
        """Receive a payload that is not wanted."""
        while nbytes:
            part = self._scratch[: min(nbytes, _SCRATCH_BYTES)]
            nbytes -= len(part)
            yield part

    def _answer(self, request: ReadRows | ReadBlock) -> list[bytes | memoryview]:
        if request.incarnation != self._incarnation:
            return [frame(Refused(self._incarnation))]
        if isinstance(request, ReadBlock):
            return self._send_block(request)
        try:
            batches = [encode(self._read(piece, request.headers)) for piece in request.pieces]
        except RLError as error:
            return [frame(failure(error))]
        sizes = tuple(sum(len(part) for part in parts) for parts in batches)
        return [frame(Sending(sizes)), *(part for parts in batches for part in parts)]

    def _send_block(self, request: ReadBlock) -> list[bytes | memoryview]:
        arena, stop = self._arena, request.offset + request.nbytes
        if arena is None or stop > len(arena):
            return [frame(failure(WireError(f"There are no bytes {request.offset} to {stop} here.")))]
        return [frame(Sending((request.nbytes,))), arena[request.offset : stop]]

    def _read(self, piece: WantedPiece, headers: tuple[bytes, ...]) -> BatchData:
        if self._arena is None or piece.header >= len(headers):
            raise WireError("There is no such memory here, or no such header in the request.")
        try:
            header = unpack_header(headers[piece.header])
        except UNREADABLE as error:
            raise WireError(f"The header of a block can't be read: {error}.") from error
        payload = self._arena[piece.offset : piece.offset + max(0, header.payload)]
        return read_payload(header, payload, piece.fields).select_rows(_rows(piece.rows, header.rows))


def _meet(into: range, span: Span) -> bool:
    return into.start < span.offset + span.nbytes and span.offset < into.stop


def _rows(wanted: tuple[int, int] | bytes, rows: int) -> range | Ints:
    if isinstance(wanted, tuple):
        first, stop = wanted
        if not first <= stop <= rows:
            raise WireError(f"There are no rows {first} to {stop} in a block of {rows} rows.")
        return range(first, stop)
    if len(wanted) % 8 or len(wanted) > 8 * rows:
        raise WireError(f"WantedPiece.rows must hold at most {rows} int64 numbers; got {len(wanted)} bytes.")
    return np.frombuffer(wanted, "<i8")
