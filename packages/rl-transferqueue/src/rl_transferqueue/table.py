"""The rows of one partition: keys, tags, where each column lies, and who consumed what. Pure.

Rows live in slots. Slots are given out in ascending order, so the order of slots is the order of age; a cleared slot stays empty until the
table is full, then the live rows move together. Every row has a generation number (uid) that ascends with age and never comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rl_protocol.meta import Scalar, Tag

Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
_SLOTS = 16


class Cells:
    """Where one column lies: per slot the block (0: not there) and the row in that block."""

    def __init__(self, slots: int) -> None:
        self.block: Ints = np.zeros(slots, np.int64)
        self.row: Ints = np.zeros(slots, np.int64)


class PartitionTable:
    """Rows of one partition; slots are valid until the next `add`."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}
        self._keys: list[str] = []
        self._tags: list[Tag] = []
        self._uid: Ints = np.zeros(_SLOTS, np.int64)
        self._alive: Bools = np.zeros(_SLOTS, np.bool_)
        self._consumed: dict[str, Bools] = {}
        self.columns: dict[str, Cells] = {}

    def __len__(self) -> int:
        return len(self._index)

    # -- rows
    def add(self, keys: Sequence[str], first_uid: int) -> Ints:
        """Slots of the keys; keys that are new become rows with the uids from `first_uid` on."""
        new = [key for key in keys if key not in self._index]
        if new:
            self._reserve(len(new))
            start = len(self._keys)
            self._index.update(zip(new, range(start, start + len(new)), strict=True))
            self._keys.extend(new)
            self._tags.extend({} for _ in new)
            self._uid[start : start + len(new)] = np.arange(first_uid, first_uid + len(new))
            self._alive[start : start + len(new)] = True
        return np.fromiter((self._index[key] for key in keys), np.int64, len(keys))

    def slots(self) -> Ints:
        """All rows, oldest first."""
        return np.flatnonzero(self._alive[: len(self._keys)])

    def find(self, keys: Iterable[str]) -> tuple[Ints, list[str]]:
        """Slots of the keys that are there, and the keys that are not."""
        found: list[int] = []
        missing: list[str] = []
        for key in keys:
            slot = self._index.get(key)
            if slot is None:
                missing.append(key)
            else:
                found.append(slot)
        return np.asarray(found, dtype=np.int64), missing

    def find_uids(self, uids: Ints) -> Ints:
        """Slots of those rows that are still there."""
        size = len(self._keys)
        if not size:
            return np.zeros(0, np.int64)
        at = np.minimum(np.searchsorted(self._uid[:size], uids), size - 1)
        return at[(self._uid[at] == uids) & self._alive[at]]

    def uids(self, slots: Ints) -> Ints:
        return self._uid[slots]

    def keys(self, slots: Ints) -> tuple[str, ...]:
        return tuple(self._keys[slot] for slot in slots.tolist())

    def tags(self, slots: Ints) -> tuple[Tag, ...]:
        """The tags themselves, not copies."""
        return tuple(self._tags[slot] for slot in slots.tolist())

    def merge_tags(self, slots: Ints, tags: Sequence[Mapping[str, Scalar]]) -> None:
        for slot, tag in zip(slots.tolist(), tags, strict=True):
            self._tags[slot].update(tag)

    def remove(self, slots: Ints) -> list[Ints]:
        """Take rows out; returns, per column, the blocks that their cells lay in."""
        self._alive[slots] = False
        for consumed in self._consumed.values():
            consumed[slots] = False
        for slot in slots.tolist():
            del self._index[self._keys[slot]]
            self._keys[slot] = ""
            self._tags[slot] = {}
        return [self._overwrite(cells, slots) for cells in self.columns.values()]

    # -- columns
    def place(self, name: str, slots: Ints, block: int) -> Ints:
        """Column `name` of the rows is now in rows 0.. of a block; returns the blocks it was in before."""
        cells = self.columns.get(name)
        if cells is None:
            cells = self.columns[name] = Cells(self._uid.size)
        before = self._overwrite(cells, slots)
        cells.block[slots] = block
        cells.row[slots] = np.arange(slots.size)
        return before

    def fields(self, slots: Ints) -> tuple[str, ...]:
        """Columns that all the rows have; none if there are no rows."""
        if not slots.size:
            return ()
        return tuple(name for name, cells in self.columns.items() if bool((cells.block[slots] != 0).all()))

    # -- readiness
    def ready(self, slots: Ints, fields: Sequence[str], where: Mapping[str, Scalar], task: str | None) -> Bools:
        """Which of the rows have all `fields`, all tags of `where`, and are not consumed by `task`."""
        mask = self._alive[slots]
        for name in fields:
            cells = self.columns.get(name)
            if cells is None:
                return np.zeros(slots.size, np.bool_)
            mask &= cells.block[slots] != 0
        if task is not None and task in self._consumed:
            mask &= ~self._consumed[task][slots]
        if where:
            for i in np.flatnonzero(mask).tolist():
                tag = self._tags[slots[i]]
                mask[i] = all(name in tag and tag[name] == value for name, value in where.items())
        return mask

    def consume(self, slots: Ints, task: str, value: bool) -> None:
        """Mark the rows as consumed by `task`, or as not consumed."""
        if task not in self._consumed:
            self._consumed[task] = np.zeros(self._uid.size, np.bool_)
        self._consumed[task][slots] = value

    # -- slots
    @staticmethod
    def _overwrite(cells: Cells, slots: Ints) -> Ints:
        before = cells.block[slots]
        cells.block[slots] = 0
        return before[before != 0]

    def _reserve(self, extra: int) -> None:
        if len(self._keys) + extra <= self._uid.size:
            return
        if len(self._index) * 2 <= len(self._keys):
            self._pack()
        need = len(self._keys) + extra
        if need > self._uid.size:
            size = max(need, 2 * self._uid.size)
            self._each_array(lambda array: np.concatenate([array, np.zeros(size - array.size, array.dtype)]))

    def _pack(self) -> None:
        live = self.slots()

        def moved(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            out = np.zeros_like(array)
            out[: live.size] = array[live]
            return out

        self._keys = list(self.keys(live))
        self._tags = list(self.tags(live))
        self._each_array(moved)
        self._index = {key: slot for slot, key in enumerate(self._keys)}

    def _each_array(self, change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> None:
        self._uid = change(self._uid)
        self._alive = change(self._alive)
        self._consumed = {task: change(array) for task, array in self._consumed.items()}
        for cells in self.columns.values():
            cells.block, cells.row = change(cells.block), change(cells.row)
