"""Keep columns that a get had to copy, so that another get of the same rows does not copy again.

A stage reads rows that another stage of the same process has read: `ref` and `update_actor` read
the tokens and images of `old_log_prob`. Rows of several blocks, and rows of another host, are
copied into new memory. Blocks never change after their commit, so the copy stays valid.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import AnyArray, Column
from rl_transferqueue.client.location_cache import Location

_SMALLEST = 64 << 10
"""Bytes of the smallest column that is kept; less is copied in microseconds."""

Place: TypeAlias = tuple[bytes, bytes]
"""int64 [N] block ids and int32 [N] rows in them. A block id is never used twice."""


class _Copy(NamedTuple):
    column: Column
    nbytes: int
    blocks: frozenset[int]


class CopiedColumns:
    """The copies used last, at most `limit_bytes` in all.

    Args:
        limit_bytes: 0 keeps nothing.
        views: whether the client reads adjacent rows of one block of a unit without a copy.
    """

    def __init__(self, limit_bytes: int, *, views: Callable[[int], bool]) -> None:
        self._limit = limit_bytes
        self._views = views
        self._copies: OrderedDict[tuple[Place, str], _Copy] = OrderedDict()
        self._bytes = 0

    def find(self, location: Location, fields: Sequence[str]) -> dict[str, Column]:
        """Those of the columns that a get before has copied."""
        found: dict[str, Column] = {}
        if self._copies:
            places = self._copied_places(location)
            for name, number in zip(fields, location.located.place_of, strict=True):
                place = places[number]
                copy = self._copies.get((place, name)) if place is not None else None
                if copy is not None and place is not None:
                    self._copies.move_to_end((place, name))
                    found[name] = copy.column
        return found

    def keep(self, location: Location, batch: BatchData) -> None:
        """Add the columns of `batch` that were copied, and drop those not used for longest."""
        if not _SMALLEST <= batch.nbytes <= self._limit:
            return  # columns of another host share one buffer, so that all of them must fit
        places = self._copied_places(location)
        if not any(places):
            return
        for name, number in zip(batch.field_names, location.located.place_of, strict=True):
            place, column = places[number], batch[name]
            nbytes = sum(buffer.nbytes for buffer in column.buffers)
            if place is None or nbytes < _SMALLEST or (place, name) in self._copies:
                continue
            self._copies[place, name] = _Copy(column, nbytes, frozenset(np.frombuffer(place[0], np.int64).tolist()))
            self._bytes += nbytes
            for buffer in column.buffers:
                _refuse_writes(buffer)
        while self._bytes > self._limit:
            self._drop(next(iter(self._copies)))

    def forget_blocks(self, blocks: Iterable[int]) -> None:
        """Drop copies of rows of these blocks."""
        gone = set(blocks)
        for key in [key for key, copy in self._copies.items() if copy.blocks & gone]:
            self._drop(key)

    def clear(self) -> None:
        """Drop all copies."""
        self._copies.clear()
        self._bytes = 0

    def _drop(self, key: tuple[Place, str]) -> None:
        self._bytes -= self._copies.pop(key).nbytes

    def _copied_places(self, location: Location) -> list[Place | None]:
        """Each of `Located.places` by block ids; None where its rows are read as a view."""
        if location.copied is None:
            refs = location.located.blocks
            ids = np.array([ref.id for ref in refs], np.int64)
            views = [self._views(ref.span.unit) for ref in refs]
            location.copied = [self._copied_place(ids, views, *packed) for packed in location.located.places]
        return location.copied

    def _copied_place(
        self, ids: np.ndarray, views: Sequence[bool], packed_blocks: bytes, packed_rows: bytes
    ) -> Place | None:
        blocks = np.frombuffer(packed_blocks, "<i4")
        if views[blocks[0]] and (blocks == blocks[0]).all():
            rows = np.frombuffer(packed_rows, "<i4")
            if (np.diff(rows) == 1).all():
                return None
        return ids[blocks].tobytes(), packed_rows


def _refuse_writes(array: AnyArray) -> None:
    """Make the memory read-only, so that `rl_protocol.torch.to_tensor` copies it."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner.flags.writeable = False
        owner = owner.base
