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
from rl_transferqueue.gather import Part, gather
from rl_transferqueue.leases import Anchor
from rl_transferqueue.messages import BlockRef, Located

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


def assemble(
    located: Located, fields: Sequence[str], mappings: Mapping[int, mmap.mmap], anchor: Anchor
) -> tuple[BatchData, Callable[[], None], int]:
    """The columns `fields` as the controller located them, the function that fills what is not a view, and the bytes it will copy.

    `mappings` holds the arena of each unit that is needed.
    """

    def opened(block: int, names: Sequence[str]) -> BatchData:
        ref, header = located.blocks[block], _header(located.headers[located.header_of[block]])
        return read_payload(header, block_memory(mappings[ref.span.unit], ref, header.payload, anchor), names)

    columns: dict[str, Column] = {}
    fills: list[Callable[[], None]] = []
    copied = 0
    for number, (packed_blocks, packed_rows) in enumerate(located.places):
        names = [name for name, place in zip(fields, located.place_of, strict=True) if place == number]
        blocks, rows = (np.frombuffer(packed, "<i4").astype(np.int64) for packed in (packed_blocks, packed_rows))
        if blocks[0] == blocks[-1] and bool((blocks == blocks[0]).all()) and bool((np.diff(rows) == 1).all()):
            batch = opened(int(blocks[0]), names)
            start, size = int(rows[0]), rows.size
            columns.update((batch if size == len(batch) else batch.select_rows(range(start, start + size))).columns)
            continue
        order = np.argsort(blocks, kind="stable")
        used, bounds = np.unique(blocks[order], return_index=True)
        parts = [
            Part(opened(block, names), rows[positions], positions)
            for block, positions in zip(used.tolist(), np.split(order, bounds[1:]), strict=True)
        ]
        batch, fill = gather(parts, rows.size)
        columns.update(batch.columns)
        fills.append(fill)
        copied += batch.nbytes

    def fill_all() -> None:
        for fill in fills:
            fill()

    return BatchData({name: columns[name] for name in fields}), fill_all, copied
