"""From block references to a batch: views where the rows lie together in one block, one gather where they do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rl_protocol.batch import BatchData
from rl_protocol.columns import Column
from rl_transferqueue.leases import Anchor
from rl_transferqueue.memory import Piece, UnitMemory
from rl_transferqueue.messages import Located
from rl_transferqueue.table import Ints


class _Part(NamedTuple):
    """Columns that lie at the same places: the pieces one after the other, then in the order `order` if there is one."""

    pieces: list[Piece]
    order: Ints | None


def assemble(
    located: Located, fields: Sequence[str], memories: Sequence[UnitMemory], anchor: Anchor, timeout_s: float
) -> BatchData:
    """The columns `fields` as the controller located them; `memories` holds each unit's. One read per unit."""
    parts = [_part(located, number, fields) for number in range(len(located.places))]
    pieces = [piece for part in parts for piece in part.pieces]
    batches: dict[int, BatchData] = {}
    for unit in dict.fromkeys(piece.block.unit for piece in pieces):
        mine = [i for i, piece in enumerate(pieces) if piece.block.unit == unit]
        batches.update(zip(mine, memories[unit].read([pieces[i] for i in mine], anchor, timeout_s), strict=True))
    columns: dict[str, Column] = {}
    first = 0
    for part in parts:
        whole = BatchData.concat([batches[i] for i in range(first, first + len(part.pieces))])
        columns.update((whole if part.order is None else whole.select_rows(part.order)).columns)
        first += len(part.pieces)
    return BatchData({name: columns[name] for name in fields})


def _part(located: Located, number: int, fields: Sequence[str]) -> _Part:
    names = tuple(name for name, place in zip(fields, located.place_of, strict=True) if place == number)
    blocks, rows = (np.frombuffer(packed, "<i4").astype(np.int64) for packed in located.places[number])

    def piece(block: int, chosen: range | Ints) -> Piece:
        return Piece(located.blocks[block], located.headers[located.header_of[block]], names, chosen)

    starts = np.flatnonzero(np.concatenate([[True], (np.diff(blocks) != 0) | (np.diff(rows) != 1)]))
    used = np.unique(blocks)
    if starts.size == used.size:  # rows of each block lie together: one copy, or none if there is but one block
        first, sizes = rows[starts].tolist(), np.diff(np.append(starts, rows.size)).tolist()
        chosen = [range(start, start + size) for start, size in zip(first, sizes, strict=True)]
        return _Part([piece(block, rows) for block, rows in zip(blocks[starts].tolist(), chosen, strict=True)], None)
    order = np.argsort(blocks, kind="stable")
    places = np.split(order, np.searchsorted(blocks[order], used[1:]))
    pieces = [piece(block, rows[at]) for block, at in zip(used.tolist(), places, strict=True)]
    if len(pieces) == 1:
        return _Part(pieces, None)
    back = np.empty_like(order)
    back[order] = np.arange(order.size)
    return _Part(pieces, back)
