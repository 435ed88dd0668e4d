"""Copies rows that are not adjacent into new memory.

`gather` allocates the columns; the function it returns fills them and may run in any thread. Small
columns are allocated in the calling thread because the C library keeps freed memory per thread,
and memory that was used before costs no page faults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import (
    AnyArray,
    Column,
    DenseColumn,
    ObjectColumn,
    Offsets,
    RaggedColumn,
    column_type,
    gather_ranges,
    offsets_from_lengths,
)
from rl_transferqueue.memory.receive_pool import ReceivePool
from rl_transferqueue.wire.arrays import Ints, span_of

_ONE_BY_ONE = 1024
"""Smallest row in bytes that is copied by itself where neither sources nor targets are adjacent."""


class Part(NamedTuple):
    """Rows `rows` of `source` go to rows `positions` of the result."""

    source: BatchData
    rows: Ints
    positions: Ints


def gather(parts: Sequence[Part], total: int, buffers: ReceivePool) -> tuple[BatchData, Callable[[], None]]:
    """A batch of `total` rows in memory of `buffers`, and the function that fills it; all parts
    have the same columns."""
    columns: dict[str, Column] = {}
    jobs: list[Callable[[], None]] = []
    for name, first in parts[0].source.columns.items():
        sources = [part.source[name] for part in parts]
        if any(column_type(c) != column_type(first) for c in sources):
            BatchData.concat([part.source.select_fields([name]) for part in parts])  # raises
        make = _dense if isinstance(first, DenseColumn) else _variable
        columns[name], more = make(first, sources, parts, total, buffers)
        jobs += more

    def fill() -> None:
        for job in jobs:
            job()

    return BatchData(columns, total), fill


def _dense(
    like: Column, sources: Sequence[Column], parts: Sequence[Part], total: int, buffers: ReceivePool
) -> tuple[Column, list[Callable[[], None]]]:
    values = like.buffers[0]
    target = buffers.empty((total, *like.dims), values.dtype)
    jobs = [_rows_job(target, source.buffers[0], part) for source, part in zip(sources, parts, strict=True)]
    return DenseColumn(target, like.dtype), jobs


def _variable(
    like: Column, sources: Sequence[Column], parts: Sequence[Part], total: int, buffers: ReceivePool
) -> tuple[Column, list[Callable[[], None]]]:
    lengths = np.zeros(total, np.int64)
    for source, part in zip(sources, parts, strict=True):
        lengths[part.positions] = np.diff(source.buffers[1])[part.rows]
    offsets = offsets_from_lengths(lengths)
    values = like.buffers[0]
    target = buffers.empty((int(offsets[-1]), *values.shape[1:]), values.dtype)
    jobs = [
        _ranges_job(target, offsets, source.buffers[0], source.buffers[1], part)
        for source, part in zip(sources, parts, strict=True)
    ]
    made = (
        RaggedColumn(target, offsets, like.dtype, like.ragged_dim)
        if isinstance(like, RaggedColumn)
        else ObjectColumn(target, offsets)
    )
    return made, jobs


def _rows_job(target: AnyArray, source: AnyArray, part: Part) -> Callable[[], None]:
    rows, positions = part.rows, part.positions
    here = span_of(positions)

    def copy() -> None:
        there = span_of(rows)
        if here is not None and there is not None:
            target[here] = source[there]
        elif here is not None:
            np.take(source, rows, axis=0, out=target[here], mode="clip")  # "raise" copies twice
        elif target.itemsize * math.prod(target.shape[1:]) < _ONE_BY_ONE:
            target[positions] = source[rows]
        else:
            for new, old in zip(positions.tolist(), rows.tolist(), strict=True):
                target[new] = source[old]

    return copy


def _ranges_job(target: AnyArray, new: Offsets, source: AnyArray, old: Offsets, part: Part) -> Callable[[], None]:
    rows, positions = part.rows, part.positions

    def copy() -> None:
        here, there = span_of(positions), span_of(rows)
        if here is not None and there is not None:
            target[new[here.start] : new[here.stop]] = source[old[there.start] : old[there.stop]]
            return
        item = target.itemsize * math.prod(target.shape[1:])
        nbytes = int((old[rows + 1] - old[rows]).sum()) * item
        if nbytes >= _ONE_BY_ONE * rows.size:
            ends = (new[positions], new[positions + 1], old[rows], old[rows + 1])
            for a, b, c, d in zip(*(end.tolist() for end in ends), strict=True):
                target[a:b] = source[c:d]
        elif here is not None:
            flat = gather_ranges(old, rows)[0]
            np.take(source, flat, axis=0, out=target[new[here.start] : new[here.stop]], mode="clip")
        else:
            target[gather_ranges(new, positions)[0]] = source[gather_ranges(old, rows)[0]]

    return copy
