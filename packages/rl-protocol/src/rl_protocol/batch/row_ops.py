"""Split, reorder and select rows of batches and of their metadata.

`Partitionable` is the interface that dispatch uses; `RowOps` derives its operations from
`select_rows` and `__len__`. The parts of a split always add up to the whole.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from rl_protocol.counted import counted
from rl_protocol.errors import BatchError, UnknownNameError

Indices = Sequence[int] | npt.NDArray[np.integer]


def check_indices(rows: Indices, size: int) -> npt.NDArray[np.int64]:
    """Check that every row number is in 0..size-1 and return them as int64.

    Negative numbers are refused because they hide mistakes.

    Raises:
        UnknownNameError: a row does not exist; names it.
    """
    array = np.asarray(rows)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BatchError(f"Row numbers must be a flat list of integers; got dtype {array.dtype}, shape {array.shape}.")
    bad = (array < 0) | (array >= size)
    if bad.any():
        raise UnknownNameError(
            f"Row {int(array[bad][0])} does not exist; this batch has rows 0..{size - 1} ({counted(size, 'row')})."
        )
    return array.astype(np.int64)


def even_sizes(total: int, parts: int) -> list[int]:
    """`parts` sizes that differ by at most one and sum to `total`.

    >>> even_sizes(7, 3)
    [3, 2, 2]

    Raises:
        BatchError: parts < 1.
    """
    if parts < 1:
        raise BatchError(f"A batch must be split into at least 1 part; got {parts}.")
    base, extra = divmod(total, parts)
    return [base + (i < extra) for i in range(parts)]


def balanced_parts(weights: Sequence[int] | npt.NDArray[np.integer], parts: int) -> list[list[int]]:
    """Row numbers of exactly `parts` parts with nearly equal weight sums.

    Longest processing time first (Graham 1969): the heaviest part weighs at most 4/3 of the
    optimum. Rows keep their order within a part and ties are broken by row number, so every process
    computes the same plan. Use token counts as weights.

    >>> balanced_parts([5, 1, 4, 2], 2)
    [[0, 1], [2, 3]]
    """
    even_sizes(0, parts)
    given = np.asarray(weights)
    if given.size and given.dtype.kind not in "iub":
        raise BatchError(f"Weights must be integers, such as token counts; got {given.dtype.name}.")
    counts = given.astype(np.int64)
    if (counts < 0).any():
        raise BatchError(f"Weights must be >= 0; row {int(counts.argmin())} has {int(counts.min())}.")
    if parts == 1:
        return [list(range(counts.size))]
    heap = [(0, 0, part) for part in range(parts)]
    plan: list[list[int]] = [[] for _ in range(parts)]
    order = np.argsort(-counts, kind="stable")
    for row, weight in zip(order.tolist(), counts[order].tolist(), strict=True):
        total, size, part = heap[0]
        plan[part].append(row)
        heapq.heapreplace(heap, (total + weight, size + 1, part))
    return [sorted(rows) for rows in plan]


@runtime_checkable
class Partitionable(Protocol):
    """Interface of batches that can be dispatched: BatchData and KVBatchMeta."""

    def __len__(self) -> int: ...
    def select_rows(self, rows: Indices) -> Self: ...
    def select_fields(self, names: Sequence[str]) -> Self: ...
    def slice(self, start: int, stop: int) -> Self: ...
    def chunk(self, parts: int) -> list[Self]: ...
    def reorder(self, rows: Indices) -> Self: ...
    def split_balanced(self, weights: Sequence[int] | npt.NDArray[np.integer], parts: int) -> list[Self]: ...
    def union(self, other: Self) -> Self: ...
    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self: ...


class RowOps(ABC):
    """Row operations derived from `select_rows` and `__len__`."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def select_rows(self, rows: Indices) -> Self:
        """The rows in the given order."""

    def slice(self, start: int, stop: int) -> Self:
        """Rows start..stop (0 <= start <= stop <= N).

        Raises:
            UnknownNameError: the range is not within the batch.
        """
        if not 0 <= start <= stop <= len(self):
            raise UnknownNameError(f"Rows {start}..{stop} are not within this batch of {counted(len(self), 'row')}.")
        return self.select_rows(range(start, stop))

    def chunk(self, parts: int) -> list[Self]:
        """Exactly `parts` consecutive parts, possibly empty, whose sizes differ by at most one."""
        out: list[Self] = []
        start = 0
        for size in even_sizes(len(self), parts):
            out.append(self.slice(start, start + size))
            start += size
        return out

    def reorder(self, rows: Indices) -> Self:
        """The same rows in another order.

        Raises:
            BatchError: `rows` is not a permutation of 0..N-1.
        """
        order = check_indices(rows, len(self))
        if order.size != len(self) or np.unique(order).size != order.size:
            raise BatchError(
                f"reorder needs each of the {len(self)} rows exactly once; got {order.size} numbers, {np.unique(order).size} distinct."
            )
        return self.select_rows(order)

    def split_balanced(self, weights: Sequence[int] | npt.NDArray[np.integer], parts: int) -> list[Self]:
        """Exactly `parts` parts with nearly equal weight sums; see `balanced_parts`.

        Raises:
            BatchError: there is not one weight per row.
        """
        if len(weights) != len(self):
            raise BatchError(
                f"split_balanced needs one weight per row: {counted(len(self), 'row')}, {counted(len(weights), 'weight')}."
            )
        return [self.select_rows(rows) for rows in balanced_parts(weights, parts)]
