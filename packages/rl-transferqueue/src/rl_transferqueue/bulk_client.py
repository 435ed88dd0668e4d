"""The asking end of bulk connections: blocking calls, each with a deadline, for worker threads."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TypeVar

import msgspec

from rl_protocol.batch import BatchData
from rl_protocol.errors import ConfigError, PlaneLostError, PlaneTimeout, WireError
from rl_protocol.wire import Header, decode, encode
from rl_transferqueue.buffers import WarmBuffers
from rl_transferqueue.bulk import (
    CHUNK,
    GREETING_BYTES,
    MAGIC,
    UNREADABLE,
    VERDICT_BYTES,
    BulkAnswer,
    Outgoing,
    ReadRows,
    Sending,
    WantedPiece,
    WriteBlock,
    Written,
    as_lifeline,
    client_proof,
    frame,
    frame_length,
    prepare,
    server_proof,
)
from rl_transferqueue.descriptor import ProcessAddress
from rl_transferqueue.hosts import split_endpoint
from rl_transferqueue.keys import HOW_TO_SET, PlaneKey
from rl_transferqueue.leases import Anchor
from rl_transferqueue.memory import Piece
from rl_transferqueue.messages import BlockRef, Failure, error_of

A = TypeVar("A", Written, Sending)
_decoder = msgspec.msgpack.Decoder[BulkAnswer](BulkAnswer)


class BulkConnection:
    """One connection after the handshake; used by one thread at a time. `close` from another thread ends what it waits for."""

    def __init__(self, peer: socket.socket, name: str, deadline: float) -> None:
        self._peer = peer
        self._name = name
        self._deadline = deadline

    def until(self, deadline: float) -> None:
        """Deadline of the calls from here on, in seconds of time.monotonic."""
        self._deadline = deadline

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        outgoing = Outgoing(parts)
        with self._failing():
            while outgoing:
                self._bound()
                outgoing.send(self._peer)

    def receive(self, target: memoryview) -> None:
        """Fill it."""
        with self._failing():
            while target:
                self._bound()
                got = self._peer.recv_into(target[:CHUNK])
                if not got:
                    raise ConnectionResetError("closed by the other side")
                target = target[got:]

    def receive_bytes(self, count: int) -> bytes:
        data = bytearray(count)
        self.receive(memoryview(data))
        return bytes(data)

    def expect(self, kind: type[A]) -> A:
        """The next answer, which must be of that kind.

        Raises:
            The error that the server answered.
        """
        packed = self.receive_bytes(frame_length(self.receive_bytes(4)))
        try:
            answer = _decoder.decode(packed)
        except UNREADABLE as error:
            raise WireError(f"The {self._name} of the data plane speaks another protocol: {error}.") from error
        if isinstance(answer, Failure):
            raise error_of(answer)
        if not isinstance(answer, kind):
            raise WireError(f"The {self._name} answered {type(answer).__name__} where {kind.__name__} was expected.")
        return answer

    def lifeline(self) -> int:
        """Its file descriptor, which is the caller's from here on, see `as_lifeline`."""
        return as_lifeline(self._peer)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)
        self._peer.close()

    def _bound(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._peer.settimeout(left)

    @contextmanager
    def _failing(self) -> Generator[None]:
        try:
            yield
        except TimeoutError:
            raise PlaneTimeout(
                f"The {self._name} of the data plane did not move all bytes before the deadline."
            ) from None
        except OSError as error:
            raise PlaneLostError(f"The connection to the {self._name} of the data plane broke: {error}.") from error


def dial(server: ProcessAddress, name: str, key: PlaneKey, session: bytes, timeout_s: float) -> BulkConnection:
    """Connect and shake hands.

    Raises:
        PlaneLostError: nobody listens there, or not the process that was meant.
        ConfigError: the keys differ.
        PlaneTimeout: no answer in time.
    """
    where = f"The {name} of the data plane at {server.bulk}"
    deadline = time.monotonic() + timeout_s
    try:
        peer = socket.create_connection(split_endpoint(server.bulk), timeout=max(timeout_s, 0.001))
    except TimeoutError:
        raise PlaneTimeout(f"{where} did not answer within {timeout_s:g} s.") from None
    except OSError as error:
        raise PlaneLostError(f"{where} can't be reached, or does not run any more: {error}.") from error
    prepare(peer)
    connection = BulkConnection(peer, name, deadline)
    try:
        greeting = connection.receive_bytes(GREETING_BYTES)
        if not greeting.startswith(MAGIC):
            raise WireError(f"{where} speaks another protocol; it greets with {greeting[:4]!r}, not {MAGIC!r}.")
        mine = os.urandom(GREETING_BYTES - len(MAGIC))
        identity = (key, server.host, server.process, greeting[len(MAGIC) :] + mine, session)
        connection.send([session + mine + client_proof(*identity)])
        verdict = connection.receive_bytes(VERDICT_BYTES)
        if not hmac.compare_digest(verdict, b"\x01" + server_proof(*identity)):
            raise ConfigError(
                f"{where} refuses this client, which has {'another key' if key else 'no key'}, or it is not the process that the descriptor "
                f"names: {HOW_TO_SET}."
            )
    except BaseException:
        connection.close()
        raise
    return connection


class RemoteMemory:
    """The arena of a unit over bulk connections. Each call has a connection of its own; idle ones are kept."""

    remote = True

    def __init__(self, unit: ProcessAddress, name: str, key: PlaneKey, session: bytes, buffers: WarmBuffers) -> None:
        self._unit = unit
        self._name = name
        self._key = key
        self._session = session
        self._buffers = buffers
        self._lock = threading.Lock()
        self._idle: list[BulkConnection] = []
        self._busy: set[BulkConnection] = set()
        self._closed = False

    def write(self, block: BlockRef, header: Header, data: BatchData, timeout_s: float) -> None:
        """See UnitMemory.write."""
        with self._connection(timeout_s) as connection:
            connection.send(
                [frame(WriteBlock(block.offset, header.payload)), *encode(data)[1:]]
            )  # all but the header: the payload
            connection.expect(Written)

    def read(self, pieces: Sequence[Piece], anchor: Anchor, timeout_s: float) -> list[BatchData]:
        """See UnitMemory.read."""
        del anchor
        headers: dict[bytes, int] = {}
        wanted = tuple(
            WantedPiece(piece.block.offset, headers.setdefault(piece.header, len(headers)), piece.fields, _rows(piece))
            for piece in pieces
        )
        with self._connection(timeout_s) as connection:
            connection.send([frame(ReadRows(tuple(headers), wanted))])
            sizes = connection.expect(Sending).sizes
            memory = self._buffers.take(sum(sizes))
            connection.receive(memory)
        stops = accumulate(sizes)
        return [decode(memory.toreadonly()[stop - size : stop]) for size, stop in zip(sizes, stops, strict=True)]

    def close(self) -> None:
        """See UnitMemory.close."""
        with self._lock:
            self._closed = True
            connections = [*self._idle, *self._busy]
            self._idle.clear()
        for connection in connections:
            connection.close()

    @contextmanager
    def _connection(self, timeout_s: float) -> Generator[BulkConnection]:
        """A connection for one call; one that failed is not used again."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = dial(self._unit, self._name, self._key, self._session, timeout_s)
        connection.until(deadline)
        with self._lock:
            self._busy.add(connection)
        try:
            if self._closed:
                raise PlaneLostError("This client is closed; connect again.")
            yield connection
        except BaseException:
            connection.close()
            raise
        else:
            with self._lock:
                if not self._closed:
                    self._idle.append(connection)
        finally:
            with self._lock:
                self._busy.discard(connection)


def _rows(piece: Piece) -> tuple[int, int] | bytes:
    return (piece.rows.start, piece.rows.stop) if isinstance(piece.rows, range) else piece.rows.astype("<i8").tobytes()
