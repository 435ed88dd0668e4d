"""Protocol of bulk connections, version 1: plain TCP between a client and a server process.

    server -> client   b"RLT1", nonce [32]
    client -> server   session [8], nonce [32], proof [32]
    server -> client   1 byte (1: accepted, 0: refused), proof [32]
    then, any number of times
    client -> server   u32 little-endian length, msgpack of `BulkRequest`; its payload (WriteBlock)
    server -> client   u32 little-endian length, msgpack of `BulkAnswer`; its payload (Sending)

* Both proofs cover both nonces, the session and the identity of the server's process: they prove
  the key, can't be replayed, and reveal a process that took the port of a server that has ended.
  Without a key the empty key is used in the same handshake.
* A server MUST end a connection that has not finished the handshake within `HANDSHAKE_S`, sends a
  frame longer than `MAX_FRAME`, or one that it can't read.
* A connection that asks for nothing shows that its client lives: its end is the end of the session
  at the controller, and its end is how a client learns that a server is gone. Dead hosts are found
  by the kernel within `DEAD_AFTER_S` (`rl_protocol.support.host.tcp_peers`).
* The payload of `WriteBlock` is received into the block. If the span is taken back meanwhile, the
  connection ends.
* Each request names the incarnation of the controller that gave the places in it. A storage unit
  has a new arena for each controller: it MUST answer `Refused` to a request that names another one
  than that of its arena, and neither read nor write for it.
* The payload of `Sending` is one batch in wire format (`rl_protocol.wire`) per requested piece, or
  the bytes of the arena that `ReadBlock` asks for.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from rl_protocol.errors import WireError
from rl_protocol.support.host.tcp_peers import expect_reader
from rl_protocol.support.shared_secret import PROOF_BYTES
from rl_transferqueue.transport.connection_limits import DEFAULT
from rl_transferqueue.transport.plane_secret import PlaneKey
from rl_transferqueue.wire.messages import MAX_FRAME, Failure
from rl_transferqueue.wire.process_liveness import ProcessId
from rl_transferqueue.wire.spans import Count

MAGIC = b"RLT1"
NONCE_BYTES = 32
SESSION_BYTES = 8
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
INTRODUCTION_BYTES = SESSION_BYTES + NONCE_BYTES + PROOF_BYTES
VERDICT_BYTES = 1 + PROOF_BYTES
HANDSHAKE_S = DEFAULT.handshake_s
CHUNK = 256 << 10
"""Bytes asked of a socket at once: what arrives is copied while it is still in the cache."""
_IOV_MAX = 1024


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    pass


class WriteBlock(_Message, frozen=True):
    """`nbytes` bytes for the arena from `offset` on follow."""

    offset: Count
    nbytes: Count
    serial: Count
    """Spans the session had abandoned late (see `Abandon`) when the write began; later ones are
    refused."""
    incarnation: Count = 1
    """Of the controller that has reserved the bytes."""


class WantedPiece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Some columns of some rows of the block at `offset`."""

    offset: Count
    header: Count
    """Place of the block's header among those of the request."""
    fields: tuple[str, ...]
    rows: tuple[Count, Count] | bytes
    """First row and the one after the last, or int64 [N]."""


class ReadRows(_Message, frozen=True):
    headers: tuple[bytes, ...]
    pieces: tuple[WantedPiece, ...]
    incarnation: Count = 1
    """Of the controller that has located the pieces."""


class ReadBlock(_Message, frozen=True):
    """The bytes of the arena from `offset` on, for the journal of a controller."""

    offset: Count
    nbytes: Count
    incarnation: Count = 1
    """Of that controller."""


class Written(_Message, frozen=True):
    pass


class Refused(_Message, frozen=True):
    """The request belongs to another controller than the unit's memory."""

    incarnation: Count
    """Of the controller to which the memory belongs."""


class Sending(_Message, frozen=True):
    """One batch per piece follows, or the bytes of a `ReadBlock`."""

    sizes: tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 50)], ...]
    """Bytes of each."""


BulkRequest: TypeAlias = WriteBlock | ReadRows | ReadBlock
BulkAnswer: TypeAlias = Written | Sending | Refused | Failure
_encoder = msgspec.msgpack.Encoder()


def frame(message: BulkRequest | BulkAnswer) -> bytes:
    """Length and msgpack.

    Raises:
        WireError: longer than a frame may be.
    """
    packed = _encoder.encode(message)
    if len(packed) > MAX_FRAME:
        raise WireError(
            f"A request of {len(packed)} bytes is over the limit of {MAX_FRAME}; ask for fewer rows at a time."
        )
    return len(packed).to_bytes(4, "little") + packed


def frame_length(head: bytes | bytearray) -> int:
    """Length of the frame that begins so.

    Raises:
        WireError: longer than a frame may be.
    """
    length = int.from_bytes(head, "little")
    if length > MAX_FRAME:
        raise WireError(f"A frame of {length} bytes was announced; the limit is {MAX_FRAME}.")
    return length


def client_proof(key: PlaneKey, host: str, server: ProcessId, nonces: bytes, session: bytes) -> bytes:
    """What the client shows; `nonces` are the server's and the client's."""
    return key.proof(b"client", nonces, session, _identity(host, server))


def server_proof(key: PlaneKey, host: str, server: ProcessId, nonces: bytes, session: bytes) -> bytes:
    """What the server shows."""
    return key.proof(b"server", nonces, session, _identity(host, server))


def _identity(host: str, server: ProcessId) -> bytes:
    return f"{host} {server.pid} {server.start}".encode()


def as_lifeline(connection: socket.socket) -> int:
    """Turn a connection into a descriptor that becomes readable when the peer or its host is gone.

    Only for connections without payload: a peer that is slow to read would look dead.
    """
    expect_reader(connection)
    return connection.detach()


def hang_up(lifeline: int) -> None:
    """Close this side of a lifeline; the end of the peer can still be seen."""
    connection = socket.socket(fileno=lifeline)
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
    connection.detach()


class Outgoing:
    """Buffers on their way out, sent without joining them."""

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        self._parts: list[bytes | memoryview] = [part for part in parts if len(part)]
        self._first = 0

    def __bool__(self) -> bool:
        return self._first < len(self._parts)

    def send(self, connection: socket.socket) -> int:
        """Send what the socket takes; the number of bytes it took."""
        sent = connection.sendmsg(self._parts[self._first : self._first + _IOV_MAX])
        left = sent
        while left:
            part = memoryview(self._parts[self._first])
            if left < len(part):
                self._parts[self._first] = part[left:]
                break
            left -= len(part)
            self._first += 1
        return sent
