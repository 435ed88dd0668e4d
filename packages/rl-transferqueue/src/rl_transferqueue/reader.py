"""From block references to a batch: views of shared memory where the rows lie together, one gather where they do not.

All memory that views refer to carries the anchor of its lease, see `leases`.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import msgspec
import numpy as np

from rl_protocol.batch import BatchData
from rl_protocol.columns import Column
from rl_protocol.wire import Header, read_payload
from rl_transferqueue.leases import Anchor
from rl_transferqueue.messages import BlockRef, Located
from rl_transferqueue.table import Ints

_header_decoder = msgspec.msgpack.Decoder(Header)


@lru_cache(maxsize=4096)
def _header(packed: bytes) -> Header:
    return _header_decoder.decode(packed)


class _Leased(np.ndarray):
    """Memory of a block that keeps its lease."""

    anchor: Anchor


def block_memory(mapping: mmap.mmap, ref: BlockRef, nbytes: int, anchor: Anchor) -> memoryview:
    """The payload of a block; whatever is made from it keeps the anchor."""
    memory = np.frombuffer(mapping, np.uint8, nbytes, ref.span.offset).view(_Leased)
    memory.anchor = anchor
    return memory.data


def assemble(located: Located, fields: Sequence[str], mappings: Mapping[int, mmap.mmap], anchor: Anchor) -> BatchData:
    """The columns `fields` as the controller located them; `mappings` holds the arena of each unit that is needed."""

    def opened(block: int, names: Sequence[str]) -> BatchData:
        ref, header = located.blocks[block], _header(located.headers[located.header_of[block]])
        return read_payload(header, block_memory(mappings[ref.span.unit], ref, header.payload, anchor), names)

    columns: dict[str, Column] = {}
    for number, (packed_blocks, packed_rows) in enumerate(located.places):
        names = [name for name, place in zip(fields, located.place_of, strict=True) if place == number]
        blocks, rows = (np.frombuffer(packed, "<i4").astype(np.int64) for packed in (packed_blocks, packed_rows))
        columns.update(_gather(blocks, rows, names, opened).columns)
    return BatchData({name: columns[name] for name in fields})


def _gather(
    blocks: Ints, rows: Ints, names: Sequence[str], opened: Callable[[int, Sequence[str]], BatchData]
) -> BatchData:
    starts = np.flatnonzero(np.concatenate([[True], (np.diff(blocks) != 0) | (np.diff(rows) != 1)]))
    used = np.unique(blocks)
    if starts.size == used.size:  # rows of each block lie together: one copy, or none if there is but one block
        stops = np.append(starts[1:], rows.size)
        return BatchData.concat(
            [
                _span(opened(int(blocks[start]), names), int(rows[start]), int(stop - start))
                for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
            ]
        )
    order = np.argsort(blocks, kind="stable")
    bounds = np.searchsorted(blocks[order], used[1:])
    parts = [
        opened(block, names).select_rows(rows[positions])
        for block, positions in zip(used.tolist(), np.split(order, bounds), strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    back = np.empty_like(order)
    back[order] = np.arange(order.size)
    return BatchData.concat(parts).select_rows(back)


def _span(batch: BatchData, start: int, size: int) -> BatchData:
    return batch if start == 0 and size == len(batch) else batch.select_rows(range(start, start + size))
