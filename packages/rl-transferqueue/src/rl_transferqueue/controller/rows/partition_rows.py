"""The rows of one partition.

Rows lie in slots. Slots are given out in ascending order, so the order of slots is the order of
age; a cleared slot stays empty until the table is full, then the live rows move together. Every row
has a generation number, which ascends with age and is never used again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_protocol.batch.kv_batch_meta import Scalar
from rl_transferqueue.controller.rows.change_log import ChangeLog
from rl_transferqueue.controller.rows.column_places import ColumnPlaces, Places
from rl_transferqueue.controller.rows.consumption import Consumption
from rl_transferqueue.controller.rows.slot_arrays import Resize, grown
from rl_transferqueue.controller.rows.tag_store import TagStore
from rl_transferqueue.wire.arrays import Bools, Ints, pack_ints, span_of
from rl_transferqueue.wire.messages import Rows

_SLOTS = 16
_SCAN = 1 << 16
"""Slots looked at in one step of a search that may end early."""


class PartitionTable:
    """Keys and generations by slot, and what else is known of each row; slots are valid until the
    next `add`.

    Args:
        version: of the plane when the partition was made.
    """

    def __init__(self, version: int = 0) -> None:
        self._index: dict[str, int] = {}
        self._keys: list[str] = []
        self._generation: Ints = np.zeros(_SLOTS, np.int64)
        self._alive: Bools = np.zeros(_SLOTS, np.bool_)
        self.tags = TagStore(_SLOTS)
        self.columns = ColumnPlaces(_SLOTS)
        self.consumption = Consumption(_SLOTS)
        self.changes = ChangeLog(_SLOTS, version)

    def __len__(self) -> int:
        return len(self._index)

    def add(self, keys: Sequence[str], first_generation: int) -> tuple[Ints, Bools]:
        """Slots of the keys, and which are new; those become rows with generations from
        `first_generation` on."""
        if len(keys) == 1:
            slot = self._index.get(keys[0])
            if slot is not None:
                return np.array([slot]), np.array([False])
            self._reserve(1)
            slot = self._index[keys[0]] = len(self._keys)
            self._keys.append(keys[0])
            self._generation[slot], self._alive[slot] = first_generation, True
            return np.array([slot]), np.array([True])
        none = self._index.keys().isdisjoint(keys)
        fresh = keys if none else [key for key in keys if key not in self._index]
        if fresh:
            self._reserve(len(fresh))
            start = len(self._keys)
            self._index.update(zip(fresh, range(start, start + len(fresh)), strict=True))
            self._keys.extend(fresh)
            self._generation[start : start + len(fresh)] = np.arange(first_generation, first_generation + len(fresh))
            self._alive[start : start + len(fresh)] = True
            if len(fresh) == len(keys):
                return np.arange(start, start + len(fresh)), np.ones(len(fresh), np.bool_)
        slots = np.fromiter(map(self._index.__getitem__, keys), np.int64, len(keys))
        return slots, slots >= len(self._keys) - len(fresh)

    def next_generations(self, keys: Sequence[str], first_generation: int) -> Ints:
        """The generations that the keys have after `add`."""
        found = list(map(self._index.get, keys))
        fresh = iter(range(first_generation, first_generation + len(keys)))
        return np.array([next(fresh) if slot is None else self._generation[slot] for slot in found], np.int64)

    def restore(self, keys: Sequence[str], generations: Ints) -> None:
        """Add rows with these generations, which ascend and are larger than all that are there."""
        slots, _ = self.add(keys, int(generations[0]))
        self._generation[slots] = generations

    def remove(self, slots: Ints) -> Places:
        """Remove rows; returns where their cells lay."""
        self._alive[slots] = False
        self.consumption.clear(slots)
        self.tags.clear(slots)
        keys = self.keys(slots)
        for slot in slots.tolist():
            self._keys[slot] = ""
        if len(keys) == len(self._index):
            self._index.clear()
        else:
            for key in keys:
                del self._index[key]
        self.changes.add_removed(keys, len(self._index))
        return self.columns.remove(slots, keys)

    # -- rows by slot, key and generation
    def slots(self) -> Ints:
        """All rows, oldest first."""
        return np.flatnonzero(self._alive[: len(self._keys)])

    def find(self, keys: Sequence[str]) -> tuple[Ints, list[str]]:
        """Slots of the keys that are there, and the keys that are not."""
        found = list(map(self._index.get, keys))
        if None not in found:
            return np.array(found, dtype=np.int64), []
        missing = [key for key, slot in zip(keys, found, strict=True) if slot is None]
        return np.array([slot for slot in found if slot is not None], dtype=np.int64), missing

    def find_generations(self, generations: Ints) -> Ints:
        """Slots of those rows that are still there."""
        size = len(self._keys)
        if not size:
            return np.zeros(0, np.int64)
        at = np.minimum(np.searchsorted(self._generation[:size], generations), size - 1)
        return at[(self._generation[at] == generations) & self._alive[at]]

    def generations(self, slots: Ints) -> Ints:
        """Generations of the rows."""
        return self._generation[slots]

    def keys(self, slots: Ints) -> tuple[str, ...]:
        """Keys of the rows."""
        span = span_of(slots)
        if span is not None:
            return tuple(self._keys[span])
        return tuple(map(self._keys.__getitem__, slots.tolist()))

    # -- readiness and changes
    def ready(self, slots: Ints | slice, fields: Sequence[str], where: Mapping[str, Scalar], task: str | None) -> Bools:
        """Which of the rows have all `fields`, all tags of `where`, and are not consumed by
        `task`."""
        columns, tags = self.columns.cells, self.tags.values
        mask = self._alive[slots].copy()
        if task is not None and task in self.consumption.flags:
            mask &= ~self.consumption.flags[task][slots]
        if not mask.any():
            return mask
        if not all(name in columns for name in fields) or not all(name in tags for name in where):
            return np.zeros_like(mask)
        for cells in {id(columns[name]): columns[name] for name in fields}.values():
            mask &= cells.block[slots] != 0
        for name, value in where.items():
            at = np.flatnonzero(mask)
            mask[at] = (tags[name][slots][at] == value).astype(np.bool_)
        return mask

    def find_ready(
        self, fields: Sequence[str], where: Mapping[str, Scalar], task: str | None, limit: int | None = None
    ) -> Ints:
        """The oldest rows that are ready, at most `limit` of them."""
        found: list[Ints] = [np.zeros(0, np.int64)]
        count = 0
        for start in range(0, len(self._keys), _SCAN):
            part = slice(start, min(start + _SCAN, len(self._keys)))
            found.append(np.flatnonzero(self.ready(part, fields, where, task)) + start)
            count += found[-1].size
            if limit is not None and count >= limit:
                break
        return np.concatenate(found)[:limit]

    def changes_since(self, version: int) -> tuple[Ints, list[str], bool]:
        """What changed after `version`.

        Returns:
            Rows that changed, least recent change first; keys that were cleared; and whether all
            rows are returned because the version is 0 or too old.
        """
        reset = version == 0 or not self.changes.knows(version)
        slots = self.changes.changed(0 if reset else version, self._alive[: len(self._keys)])
        return slots, [] if reset else self.changes.removed(version, self._index), reset

    # -- room
    def _reserve(self, extra: int) -> None:
        if len(self._keys) + extra <= self._generation.size:
            return
        if len(self._index) * 2 <= len(self._keys):
            self._pack()
        need = len(self._keys) + extra
        if need > self._generation.size:
            size = max(need, self._generation.size + self._generation.size // 2)
            self._resize(size, lambda array: grown(array, size))

    def _pack(self) -> None:
        live = self.slots()

        def moved(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return grown(array[live], array.size)

        self._keys = list(self.keys(live))
        self.columns.drop_unused(live)
        self._resize(self._generation.size, moved)
        self._index = {key: slot for slot, key in enumerate(self._keys)}

    def _resize(self, slots: int, change: Resize) -> None:
        self._generation, self._alive = change(self._generation), change(self._alive)
        self.changes.resize(change)
        for part in (self.consumption, self.tags, self.columns):
            part.resize(slots, change)


def describe_rows(table: PartitionTable, slots: Ints) -> Rows:
    """The rows as callers see them."""
    generations = pack_ints(table.generations(slots))
    return Rows(table.keys(slots), table.tags.of(slots), table.columns.common(slots), generations)
