"""Builds batches from located blocks: views of adjacent rows of one block, copies of other rows."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import Column
from rl_transferqueue.memory.gather_rows import Part, gather
from rl_transferqueue.memory.receive_pool import ReceivePool
from rl_transferqueue.wire.arrays import Ints, span_of
from rl_transferqueue.wire.messages import Located
from rl_transferqueue.wire.spans import Span

_ONE = struct.Struct("<i")
"""Packed place of a single row."""
_FIRST: Ints = np.zeros(1, np.int64)


class Piece(NamedTuple):
    """Some columns of some rows of one block."""

    span: Span
    header: bytes
    """msgpack of the block's rl_protocol.wire.Header."""
    fields: tuple[str, ...]
    rows: range | Ints
    """Rows of the block; a range if they are adjacent."""
    positions: Ints
    """The position of each row in the batch."""


Groups: TypeAlias = Sequence[Sequence[Piece]]
"""For each set of columns with the same places, one piece per block."""
Source = Callable[[Piece], "tuple[BatchData, range | Ints]"]
"""A batch with the columns of a piece, and which of its rows are meant."""


def pieces_of(located: Located, fields: Sequence[str]) -> list[list[Piece]]:
    """What to read: for each set of columns with the same places, one piece per block."""
    names: list[list[str]] = [[] for _ in located.places]
    for name, place in zip(fields, located.place_of, strict=True):
        names[place].append(name)
    return [_pieces(located, number, tuple(its)) for number, its in enumerate(names)]


def assemble(
    groups: Groups, fields: Sequence[str], source: Source, buffers: ReceivePool
) -> tuple[BatchData, Callable[[], None], int]:
    """Returns the columns, a function that fills those that are not views, and the bytes it
    copies."""
    columns: dict[str, Column] = {}
    fills: list[Callable[[], None]] = []
    copied = 0
    for pieces in groups:
        found = [source(piece) for piece in pieces]
        if len(found) == 1 and isinstance(found[0][1], range):
            batch, rows = found[0]
            columns.update((batch if len(rows) == len(batch) else batch.select_rows(rows)).columns)
            continue
        parts = [
            Part(batch, np.asarray(rows, np.int64), piece.positions)
            for (batch, rows), piece in zip(found, pieces, strict=True)
        ]
        batch, fill = gather(parts, sum(piece.positions.size for piece in pieces), buffers)
        columns.update(batch.columns)
        fills.append(fill)
        copied += batch.nbytes

    def fill_all() -> None:
        for fill in fills:
            fill()

    return BatchData({name: columns[name] for name in fields}), fill_all, copied


def _pieces(located: Located, number: int, names: tuple[str, ...]) -> list[Piece]:
    def piece(block: int, rows: range | Ints, positions: Ints) -> Piece:
        return Piece(located.blocks[block].span, located.headers[located.header_of[block]], names, rows, positions)

    if len(located.places[number][0]) == _ONE.size:
        (block,), (row,) = map(_ONE.unpack, located.places[number])
        return [piece(block, range(row, row + 1), _FIRST)]
    blocks, rows = (np.frombuffer(packed, "<i4").astype(np.int64) for packed in located.places[number])
    if blocks[0] == blocks[-1] and bool((blocks == blocks[0]).all()):
        return [piece(int(blocks[0]), _together(rows), np.arange(rows.size))]
    order = np.argsort(blocks, kind="stable")
    used, bounds = np.unique(blocks[order], return_index=True)
    return [
        piece(block, _together(rows[positions]), positions)
        for block, positions in zip(used.tolist(), np.split(order, bounds[1:]), strict=True)
    ]


def _together(rows: Ints) -> range | Ints:
    """The rows, as a range if they are adjacent."""
    span = span_of(rows)
    return rows if span is None else range(span.start, span.stop)
