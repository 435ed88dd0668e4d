"""RemoteMemory: the memory of a plane on another host, moved over TCP by threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TypeVar

import numpy as np

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import AnyArray
from rl_protocol.errors import PlaneLostError
from rl_protocol.wire import Header, decode, encode
from rl_transferqueue.client.memory_interface import PlaneMemory
from rl_transferqueue.memory.anchors import Anchor
from rl_transferqueue.memory.build_batch import Piece, assemble, pieces_of
from rl_transferqueue.memory.receive_pool import ReceivePool
from rl_transferqueue.transport.bulk_client import BulkConnection, dial
from rl_transferqueue.transport.bulk_protocol import (
    HANDSHAKE_S,
    ReadRows,
    Sending,
    WantedPiece,
    WriteBlock,
    Written,
    frame,
)
from rl_transferqueue.transport.plane_secret import PlaneKey
from rl_transferqueue.wire.arrays import Ints
from rl_transferqueue.wire.descriptor import UnitAddress
from rl_transferqueue.wire.messages import Located
from rl_transferqueue.wire.spans import Span

T = TypeVar("T")

_THREADS = 8
"""Concurrent transfers of one client."""


class _Transfer:
    """A transfer in a thread that other threads can end, before or after it has a connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: BulkConnection | None = None
        self._ended = False

    def hold(self, connection: BulkConnection) -> None:
        with self._lock:
            self._connection = connection
            if self._ended:
                raise PlaneLostError("This transfer was cancelled, or its client is closed.")

    def end(self) -> None:
        with self._lock:
            self._ended = True
            if self._connection is not None:
                self._connection.interrupt()


class RemoteMemory(PlaneMemory):
    """Memory of units on another host. Each transfer has its own connection; idle ones are kept."""

    views = False

    def __init__(self, host: str, units: Sequence[UnitAddress], key: PlaneKey, session: bytes) -> None:
        self._host = host
        self._units = units
        self._key = key
        self._session = session
        self._buffers = ReceivePool()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="rl-transferqueue-bulk")
        self._lock = threading.Lock()
        self._idle: dict[int, list[BulkConnection]] = {unit: [] for unit in range(len(units))}
        self._transfers: set[_Transfer] = set()
        self._closed = False
        self._abandoned = 0
        """Number of spans given back during a write; tells units which writes are stale."""
        self._begun: set[Span] = set()
        """Spans with a write that is under way or has failed."""

    def draft(self, span: Span, nbytes: int) -> AnyArray:
        del span
        return np.frombuffer(self._buffers.take(nbytes), np.uint8)

    async def finish(self, span: Span, header: Header, batch: BatchData, timeout_s: float) -> None:
        await self.write(span, header, batch, timeout_s)

    async def write(self, span: Span, header: Header, data: BatchData, timeout_s: float) -> None:
        begin = frame(WriteBlock(span.offset, header.payload, self._abandoned))

        def send(connection: BulkConnection) -> None:
            payload = encode(data)[1:]  # all but the header
            connection.send([begin, *payload])
            connection.expect(Written)

        self._begun.add(span)
        await self._run(lambda transfer: self._exchange(span.unit, send, transfer, timeout_s))
        self._begun.remove(span)

    async def read(self, located: Located, fields: Sequence[str], anchor: Anchor, timeout_s: float) -> BatchData:
        """Fetch only these rows and columns, with one request per unit."""
        del anchor
        groups = pieces_of(located, fields)
        deadline = time.monotonic() + timeout_s

        def fetch(transfer: _Transfer) -> BatchData:
            batches: dict[int, BatchData] = {}
            pieces = [piece for group in groups for piece in group]
            for unit in dict.fromkeys(piece.span.unit for piece in pieces):
                wanted = [piece for piece in pieces if piece.span.unit == unit]
                left = deadline - time.monotonic()
                got = self._exchange(
                    unit, lambda connection, wanted=wanted: self._fetch(connection, wanted), transfer, left
                )
                batches.update(zip(map(id, wanted), got, strict=True))

            def whole(piece: Piece) -> tuple[BatchData, range | Ints]:
                batch = batches[id(piece)]
                return batch, range(len(batch))

            batch, fill, _ = assemble(groups, fields, whole, self._buffers)
            fill()
            return batch

        return await self._run(fetch)

    def abandon(self, span: Span) -> bool:
        if span not in self._begun:
            return False
        self._begun.remove(span)
        self._abandoned += 1
        return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle = [connection for connections in self._idle.values() for connection in connections]
            transfers = list(self._transfers)
        for connection in idle:
            connection.close()
        for transfer in transfers:
            transfer.end()
        self._threads.shutdown(wait=False)

    async def _run(self, work: Callable[[_Transfer], T]) -> T:
        """Run in a thread; if cancelled, end the transfer and wait for the thread."""
        if self._closed:
            raise PlaneLostError("This client is closed; connect again.")
        transfer = _Transfer()
        with self._lock:
            self._transfers.add(transfer)
        done = asyncio.get_running_loop().run_in_executor(self._threads, work, transfer)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            transfer.end()
            await asyncio.wait((done,))
            if not done.cancelled():
                done.exception()  # mark it as retrieved
            raise
        finally:
            with self._lock:
                self._transfers.discard(transfer)

    def _exchange(self, unit: int, talk: Callable[[BulkConnection], T], transfer: _Transfer, timeout_s: float) -> T:
        """Use a connection to a unit; after any failure it is closed and not reused."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            connection = self._idle[unit].pop() if self._idle[unit] else None
        if connection is None:
            seconds = min(timeout_s, HANDSHAKE_S)
            connection = dial(self._units[unit], self._host, f"storage unit {unit}", self._key, self._session, seconds)
        try:
            transfer.hold(connection)
            connection.until(deadline)
            result = talk(connection)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            keep = not self._closed
            if keep:
                self._idle[unit].append(connection)
        if not keep:
            connection.close()
        return result

    def _fetch(self, connection: BulkConnection, pieces: Sequence[Piece]) -> list[BatchData]:
        headers: dict[bytes, int] = {}
        wanted = tuple(
            WantedPiece(p.span.offset, headers.setdefault(p.header, len(headers)), p.fields, _rows(p)) for p in pieces
        )
        connection.send([frame(ReadRows(tuple(headers), wanted))])
        sizes = connection.expect(Sending).sizes
        memory = self._buffers.take(sum(sizes))
        connection.receive(memory)
        stops = accumulate(sizes)
        return [decode(memory.toreadonly()[stop - size : stop]) for size, stop in zip(sizes, stops, strict=True)]


def _rows(piece: Piece) -> tuple[int, int] | bytes:
    return (piece.rows.start, piece.rows.stop) if isinstance(piece.rows, range) else piece.rows.astype("<i8").tobytes()
