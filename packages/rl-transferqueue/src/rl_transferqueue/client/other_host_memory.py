"""The memory of units on other hosts, moved over TCP by threads; alone, and beside units of this
host."""

from __future__ import annotations

import asyncio
import ipaddress
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TypeVar

import numpy as np

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import AnyArray
from rl_protocol.errors import PlaneLostError
from rl_protocol.wire import Header, decode, encode
from rl_transferqueue.client.memory_interface import OnMoved, PlaneMemory, copying, wait_through
from rl_transferqueue.client.retries.controller_replaced import ControllerReplaced
from rl_transferqueue.client.same_host_memory import LocalMemory
from rl_transferqueue.memory.anchors import Anchor
from rl_transferqueue.memory.build_batch import Groups, Piece, assemble
from rl_transferqueue.memory.receive_pool import ReceivePool
from rl_transferqueue.transport.addresses import split_endpoint
from rl_transferqueue.transport.bulk_client import BulkConnection, IncarnationEnded, dial
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
from rl_transferqueue.wire.messages import LinkBytes
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

    def release(self) -> bool:
        """Hold the connection no more; returns whether others can use it."""
        with self._lock:
            self._connection = None
            return not self._ended

    def end(self) -> None:
        with self._lock:
            self._ended = True
            if self._connection is not None:
                self._connection.interrupt()


class RemoteMemory(PlaneMemory):
    """Memory of units on other hosts. Each transfer has its own connection; idle ones are kept.

    Args:
        units: their addresses by number.
        key: that of the plane.
        session: this client's.
        on_moved: is called with the bytes of each put and get.
        incarnation: of the controller that gives the places of blocks.
        on_replaced: is called when a unit says that this controller has a successor.
    """

    def __init__(
        self,
        units: Mapping[int, UnitAddress],
        key: PlaneKey,
        session: bytes,
        on_moved: OnMoved,
        incarnation: int = 1,
        on_replaced: Callable[[], object] = lambda: None,
    ) -> None:
        self._units = units
        self._links = {unit: _link(address) for unit, address in units.items()}
        self._on_moved = on_moved
        self._key = key
        self._session = session
        self._incarnation = incarnation
        self._on_replaced = on_replaced
        self._buffers = ReceivePool()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="rl-transferqueue-bulk")
        self._lock = threading.Lock()
        self._idle: dict[int, list[BulkConnection]] = {unit: [] for unit in units}
        self._transfers: set[_Transfer] = set()
        self._closed = False
        self._abandoned = 0
        """Number of spans given back during a write; tells units which writes are stale."""
        self._begun: set[Span] = set()
        """Spans with a write that is under way or has failed."""

    def views(self, unit: int) -> bool:
        del unit
        return False

    def draft(self, span: Span, nbytes: int) -> AnyArray:
        del span
        return np.frombuffer(self._buffers.take(nbytes), np.uint8)

    async def finish(self, span: Span, header: Header, batch: BatchData, timeout_s: float) -> None:
        await self.write(span, header, batch, timeout_s)

    async def write(self, span: Span, header: Header, data: BatchData, timeout_s: float) -> None:
        begin = frame(WriteBlock(span.offset, header.payload, self._abandoned, self._incarnation))

        def send(connection: BulkConnection) -> None:
            payload = encode(data)[1:]  # all but the header
            connection.send([begin, *payload])
            connection.expect(Written)

        self._begun.add(span)
        await self._run(lambda transfer: self._exchange(span.unit, send, transfer, timeout_s))
        self._begun.remove(span)
        self._count(span.unit, header.payload)

    async def read(self, groups: Groups, fields: Sequence[str], anchor: Anchor, timeout_s: float) -> BatchData:
        """Fetch only these rows and columns, with one request per unit."""
        del anchor

        def whole(batches: Mapping[int, BatchData]) -> BatchData:
            def source(piece: Piece) -> tuple[BatchData, range | Ints]:
                batch = batches[id(piece)]
                return batch, range(len(batch))

            batch, fill, _ = assemble(groups, fields, source, self._buffers)
            fill()
            return batch

        return await self._fetch_all([piece for group in groups for piece in group], timeout_s, whole)

    async def fetch(self, pieces: Sequence[Piece], timeout_s: float) -> dict[int, BatchData]:
        """The rows of each piece, by the piece's `id`, with one request per unit.

        Raises:
            PlaneTimeout, PlaneLostError: see `read`.
        """
        return await self._fetch_all(pieces, timeout_s, dict)

    async def _fetch_all(
        self, pieces: Sequence[Piece], timeout_s: float, use: Callable[[Mapping[int, BatchData]], T]
    ) -> T:
        """Fetch the pieces and use them, by their ids, in a thread."""
        deadline = time.monotonic() + timeout_s
        batches: dict[int, BatchData] = {}

        def fetch(transfer: _Transfer) -> T:
            for unit in dict.fromkeys(piece.span.unit for piece in pieces):
                wanted = [piece for piece in pieces if piece.span.unit == unit]
                left = deadline - time.monotonic()
                got = self._exchange(
                    unit, lambda connection, wanted=wanted: self._fetch(connection, wanted), transfer, left
                )
                batches.update(zip(map(id, wanted), got, strict=True))
            return use(batches)

        result = await self._run(fetch)
        for piece in pieces:
            self._count(piece.span.unit, batches[id(piece)].nbytes)
        return result

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
        except IncarnationEnded as error:
            if not self._closed:
                self._on_replaced()
            raise ControllerReplaced(error.message) from error
        except asyncio.CancelledError:
            transfer.end()
            await wait_through(done)
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
            address = self._units[unit]
            connection = dial(address, address.host, f"storage unit {unit}", self._key, self._session, seconds)
        try:
            transfer.hold(connection)
            connection.until(deadline)
            result = talk(connection)
        except BaseException:
            connection.close()
            raise
        usable = transfer.release()
        with self._lock:
            keep = usable and not self._closed
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
        connection.send([frame(ReadRows(tuple(headers), wanted, self._incarnation))])
        sizes = connection.expect(Sending).sizes
        memory = self._buffers.take(sum(sizes))
        connection.receive(memory)
        stops = accumulate(sizes)
        return [decode(memory.toreadonly()[stop - size : stop]) for size, stop in zip(sizes, stops, strict=True)]

    def _count(self, unit: int, nbytes: int) -> None:
        self._on_moved(LinkBytes(**{self._links[unit]: nbytes}))


class HostsMemory(PlaneMemory):
    """Memory of the units `near` this process, and of those of other hosts.

    Args:
        local: the memory of the units near.
        remote: the memory of the other units.
    """

    def __init__(self, local: LocalMemory, remote: RemoteMemory) -> None:
        self._local = local
        self._remote = remote
        self._buffers = ReceivePool()

    def views(self, unit: int) -> bool:
        return self._local.views(unit)

    def draft(self, span: Span, nbytes: int) -> AnyArray:
        return self._of(span).draft(span, nbytes)

    async def finish(self, span: Span, header: Header, batch: BatchData, timeout_s: float) -> None:
        await self._of(span).finish(span, header, batch, timeout_s)

    async def write(self, span: Span, header: Header, data: BatchData, timeout_s: float) -> None:
        await self._of(span).write(span, header, data, timeout_s)

    async def read(self, groups: Groups, fields: Sequence[str], anchor: Anchor, timeout_s: float) -> BatchData:
        """Fetch the rows of other hosts, and join them with those of this host."""
        pieces = [piece for group in groups for piece in group]
        far = [piece for piece in pieces if not self._local.views(piece.span.unit)]
        if not far:
            return await self._local.read(groups, fields, anchor, timeout_s)
        if len(far) == len(pieces):
            return await self._remote.read(groups, fields, anchor, timeout_s)
        fetched = await self._remote.fetch(far, timeout_s)

        def source(piece: Piece) -> tuple[BatchData, range | Ints]:
            if self._local.views(piece.span.unit):
                return self._local.view(piece, anchor)
            batch = fetched[id(piece)]
            return batch, range(len(batch))

        batch, fill, copied = assemble(groups, fields, source, self._buffers)
        if copied:
            await copying(copied, fill)
        self._local.count(max(0, batch.nbytes - sum(its.nbytes for its in fetched.values())))
        return batch

    def abandon(self, span: Span) -> bool:
        return self._of(span).abandon(span)

    def close(self) -> None:
        self._local.close()
        self._remote.close()

    def _of(self, span: Span) -> LocalMemory | RemoteMemory:
        return self._local if self._local.views(span.unit) else self._remote


def _link(unit: UnitAddress) -> str:
    """The field of LinkBytes that counts what moves between this process and the unit."""
    return "loopback" if ipaddress.ip_address(split_endpoint(unit.bulk)[0]).is_loopback else "network"


def _rows(piece: Piece) -> tuple[int, int] | bytes:
    return (piece.rows.start, piece.rows.stop) if isinstance(piece.rows, range) else piece.rows.astype("<i8").tobytes()
