"""LocalMemory: the arenas of storage units on this host, mapped into this process."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import AnyArray
from rl_protocol.wire import Header, read_payload, write_payload
from rl_transferqueue.client.memory_interface import OnMoved, PlaneMemory, copying
from rl_transferqueue.memory.anchors import Anchor, anchored
from rl_transferqueue.memory.arena import EnteredPages, map_arena
from rl_transferqueue.memory.build_batch import Groups, Piece, assemble
from rl_transferqueue.memory.receive_pool import ReceivePool
from rl_transferqueue.wire.arrays import Ints
from rl_transferqueue.wire.descriptor import UnitAddress
from rl_transferqueue.wire.header_cache import unpack_header
from rl_transferqueue.wire.messages import LinkBytes
from rl_transferqueue.wire.spans import Span


class LocalMemory(PlaneMemory):
    """Memory of units on this host: a write copies once, a read of adjacent rows does not copy.

    Args:
        units: their addresses by number.
        on_moved: is called with the bytes of each put and get.
    """

    def __init__(self, units: Mapping[int, UnitAddress], on_moved: OnMoved) -> None:
        self._units = units
        self._on_moved = on_moved
        self._buffers = ReceivePool()
        self._mappings: dict[tuple[int, bool], mmap.mmap] = {}
        self._entered: dict[int, EnteredPages] = {}
        """Pages of each unit's arena that this process has written to."""

    def views(self, unit: int) -> bool:
        return unit in self._units

    def count(self, nbytes: int) -> None:
        """So many bytes were put or got."""
        self._on_moved(LinkBytes(shared_memory=nbytes))

    def draft(self, span: Span, nbytes: int) -> AnyArray:
        return np.frombuffer(self._map(span.unit, True), np.uint8, nbytes, span.offset)

    async def finish(self, span: Span, header: Header, batch: BatchData, timeout_s: float) -> None:
        """A draft already lies in its span."""
        del span, batch, timeout_s
        self.count(header.payload)

    async def write(self, span: Span, header: Header, data: BatchData, timeout_s: float) -> None:
        del timeout_s
        mapping = self._map(span.unit, True)
        target = memoryview(mapping)[span.offset : span.offset + header.payload]
        entered = self._entered.setdefault(span.unit, EnteredPages())

        def write() -> None:
            entered.enter(mapping, span.offset, header.payload)
            write_payload(data, header, target)

        await copying(header.payload, write)
        self.count(header.payload)

    async def read(self, groups: Groups, fields: Sequence[str], anchor: Anchor, timeout_s: float) -> BatchData:
        del timeout_s

        source = partial(self.view, anchor=anchor)
        batch, fill, copied = assemble(groups, fields, source, self._buffers)
        if copied:
            await copying(copied, fill)
        self.count(batch.nbytes)
        return batch

    def view(self, piece: Piece, anchor: Anchor) -> tuple[BatchData, range | Ints]:
        """The columns of a piece as views of its whole block, and which rows of it are meant."""
        header = unpack_header(piece.header)
        payload = anchored(self._map(piece.span.unit, False), piece.span.offset, header.payload, anchor)
        return read_payload(header, payload, piece.fields), piece.rows

    def abandon(self, span: Span) -> bool:
        del span
        return False

    def close(self) -> None:
        self._mappings.clear()

    def _map(self, unit: int, writable: bool) -> mmap.mmap:
        mapping = self._mappings.get((unit, writable))
        if mapping is None:
            mapping = self._mappings[unit, writable] = map_arena(self._units[unit], writable=writable)
        return mapping
