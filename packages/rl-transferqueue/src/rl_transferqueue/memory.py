"""How a client reaches the memory of one storage unit: here through the arena's pages, elsewhere over the network."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from rl_protocol.batch import BatchData
from rl_protocol.wire import Header, read_payload, write_payload
from rl_transferqueue.arena import map_arena
from rl_transferqueue.descriptor import UnitAddress
from rl_transferqueue.leases import Anchor
from rl_transferqueue.messages import BlockRef
from rl_transferqueue.table import Ints

_header_decoder = msgspec.msgpack.Decoder(Header)


@lru_cache(maxsize=4096)
def unpack_header(packed: bytes) -> Header:
    """The header of a block from its msgpack."""
    return _header_decoder.decode(packed)


class Piece(NamedTuple):
    """Some columns of some rows of one block."""

    block: BlockRef
    header: bytes
    """msgpack of the block's rl_protocol.wire.Header."""
    fields: tuple[str, ...]
    rows: range | Ints
    """Rows of the block, in the order wanted."""


class UnitMemory(Protocol):
    """The memory of one unit. Calls block; those of a memory that is `remote` may wait, so they are made in threads."""

    remote: bool

    def write(self, block: BlockRef, header: Header, data: BatchData, timeout_s: float) -> None:
        """Copy the columns of `data` into a block that this session was given.

        Raises:
            PlaneTimeout, PlaneLostError: as their names say; the block holds anything.
        """
        ...

    def read(self, pieces: Sequence[Piece], anchor: Anchor, timeout_s: float) -> list[BatchData]:
        """One batch per piece. What still refers to the unit's memory keeps `anchor`, so its block stays as it is.

        Raises:
            PlaneTimeout, PlaneLostError: as their names say.
        """
        ...

    def close(self) -> None:
        """Calls under way may fail from here on; batches that were read stay valid."""
        ...


class _Anchored(np.ndarray):
    """Memory that keeps an object alive whose end says that nobody looks at the memory any more."""

    anchor: object


def anchored(memory: mmap.mmap, start: int, nbytes: int, anchor: object) -> memoryview:
    """Part of a mapping; whatever is made from it keeps the anchor."""
    array = np.frombuffer(memory, np.uint8, nbytes, start).view(_Anchored)
    array.anchor = anchor
    return array.data


def select(batch: BatchData, rows: range | Ints) -> BatchData:
    """The rows: the batch itself if they are all, views if they lie together, else copies."""
    return batch if isinstance(rows, range) and rows == range(len(batch)) else batch.select_rows(rows)


class LocalMemory:
    """The arena of a unit on this host: a write is one copy, a read of rows that lie together none."""

    remote = False

    def __init__(self, unit: UnitAddress) -> None:
        self._unit = unit
        self._mappings: dict[bool, mmap.mmap] = {}

    def write(self, block: BlockRef, header: Header, data: BatchData, timeout_s: float) -> None:
        """See UnitMemory.write."""
        del timeout_s
        write_payload(data, header, memoryview(self._map(True))[block.offset : block.offset + header.payload])

    def read(self, pieces: Sequence[Piece], anchor: Anchor, timeout_s: float) -> list[BatchData]:
        """See UnitMemory.read."""
        del timeout_s
        return [self._read(piece, anchor) for piece in pieces]

    def close(self) -> None:
        """See UnitMemory.close."""
        self._mappings.clear()

    def _read(self, piece: Piece, anchor: Anchor) -> BatchData:
        header = unpack_header(piece.header)
        payload = anchored(self._map(False), piece.block.offset, header.payload, anchor)
        return select(read_payload(header, payload, piece.fields), piece.rows)

    def _map(self, writable: bool) -> mmap.mmap:
        mapping = self._mappings.get(writable)
        if mapping is None:
            mapping = self._mappings[writable] = map_arena(self._unit, writable=writable)
        return mapping
