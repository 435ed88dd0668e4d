"""The rows of one partition: keys, tags, where each column lies, who consumed what, and what changed when. Pure.

Rows live in slots. Slots are given out in ascending order, so the order of slots is the order of age; a cleared slot stays empty until the
table is full, then the live rows move together. Every row has a generation number (uid) that ascends with age and never comes again.

Columns that were always written together share one `Cells`; a million values in sixteen such columns cost the memory of one column.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rl_protocol.meta import Scalar
from rl_transferqueue.messages import TagColumn

Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Places: TypeAlias = list[tuple[Ints, int]]
"""(block slots of cells [M], columns that those cells stand for)."""

_SLOTS = 16
_SCAN = 1 << 16
"""Slots looked at in one step of a search that may end early."""
_TOMBSTONES = 4096
"""Cleared rows that are remembered for those who watch, at least, unless ..."""
_TOMBSTONE_CHARACTERS = 128
"""... their keys are longer than this on average."""
_POOLED = 4096
"""Texts that are kept once, at most ..."""
_POOLED_CHARACTERS = 64
"""... and characters of each, at most."""
_ABSENT = object()
_NOWHERE: Ints = np.zeros(0, np.int64)


def span_of(numbers: Ints) -> slice | None:
    """The numbers as a slice, if each follows the one before."""
    if numbers.size and int(numbers[-1]) - int(numbers[0]) == numbers.size - 1 and bool((np.diff(numbers) == 1).all()):
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return None


class Cells:
    """Where `columns` columns lie: per slot the block's slot (0: not there) and the row in that block."""

    def __init__(self, slots: int) -> None:
        self.columns = 0
        self.block: npt.NDArray[np.int32] = np.zeros(slots, np.int32)
        self.row: npt.NDArray[np.int32] = np.zeros(slots, np.int32)


class PartitionTable:
    """Rows of one partition; slots are valid until the next `add`.

    Args:
        version: of the plane when the partition came to be; what was before is not known here.
    """

    def __init__(self, version: int = 0) -> None:
        self._index: dict[str, int] = {}
        self._keys: list[str] = []
        self._uid: Ints = np.zeros(_SLOTS, np.int64)
        self._alive: Bools = np.zeros(_SLOTS, np.bool_)
        self._changed: Ints = np.zeros(_SLOTS, np.int64)
        self._tags: dict[str, npt.NDArray[Any]] = {}
        self._pool: dict[str, str] = {}
        self._consumed: dict[str, Bools] = {}
        self._families: list[Cells] = []
        self.columns: dict[str, Cells] = {}
        self.lost: dict[str, set[str]] = {}
        """key -> columns that went with a storage unit and were not written again."""
        self.version = version
        """Version of the last change."""
        self._removed: deque[tuple[int, str]] = deque()
        self._removed_characters = 0
        self._forgotten = version
        """Rows that were cleared up to this version are not in `_removed` any more."""

    def __len__(self) -> int:
        return len(self._index)

    # -- rows
    def add(self, keys: Sequence[str], first_uid: int) -> tuple[Ints, Bools]:
        """Slots of the keys, and which are new; those become rows with the uids from `first_uid` on."""
        if len(keys) == 1:
            slot, new = self._add_one(keys[0], first_uid)
            return np.array([slot]), np.array([new])
        fresh = [key for key in keys if key not in self._index]
        if fresh:
            self._reserve(len(fresh))
            start = len(self._keys)
            self._index.update(zip(fresh, range(start, start + len(fresh)), strict=True))
            self._keys.extend(fresh)
            self._uid[start : start + len(fresh)] = np.arange(first_uid, first_uid + len(fresh))
            self._alive[start : start + len(fresh)] = True
            if len(fresh) == len(keys):
                return np.arange(start, start + len(fresh)), np.ones(len(fresh), np.bool_)
        slots = np.fromiter(map(self._index.__getitem__, keys), np.int64, len(keys))
        return slots, slots >= len(self._keys) - len(fresh)

    def _add_one(self, key: str, uid: int) -> tuple[int, bool]:
        slot = self._index.get(key)
        if slot is not None:
            return slot, False
        self._reserve(1)
        slot = self._index[key] = len(self._keys)
        self._keys.append(key)
        self._uid[slot], self._alive[slot] = uid, True
        return slot, True

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
        span = span_of(slots)
        if span is not None:
            return tuple(self._keys[span])
        return tuple(map(self._keys.__getitem__, slots.tolist()))

    def remove(self, slots: Ints) -> Places:
        """Take rows out; returns where their cells lay."""
        self._alive[slots] = False
        for consumed in self._consumed.values():
            consumed[slots] = False
        for values in self._tags.values():
            values[slots] = _ABSENT
        for slot in slots.tolist():
            key = self._keys[slot]
            del self._index[key]
            self.lost.pop(key, None)
            self._removed.append((self.version, key))
            self._removed_characters += len(key)
            self._keys[slot] = ""
        most = max(_TOMBSTONES, 2 * len(self._index))
        while len(self._removed) > most or self._removed_characters > _TOMBSTONE_CHARACTERS * most:
            self._forgotten, key = self._removed.popleft()
            self._removed_characters -= len(key)
        return [(_overwrite(cells, slots, 0), cells.columns) for cells in self._families]

    # -- tags
    def tags(self, slots: Ints) -> tuple[TagColumn, ...]:
        """All tags of the rows."""
        out: list[TagColumn] = []
        for name, column in self._tags.items():
            values = column[slots].tolist()
            if _ABSENT not in values:
                out.append(TagColumn(name, tuple(values)))
                continue
            rows = [i for i, value in enumerate(values) if value is not _ABSENT]
            if rows:
                out.append(TagColumn(name, tuple(values[i] for i in rows), np.array(rows, "<i4").tobytes()))
        return tuple(out)

    def tags_of(self, slot: int) -> dict[str, Scalar]:
        """The tags of one row."""
        return {name: column[slot] for name, column in self._tags.items() if column[slot] is not _ABSENT}

    def merge_tags(self, slots: Ints, tags: Iterable[TagColumn]) -> None:
        """Tags of the rows; rows in `tags` count within `slots`."""
        for tag in tags:
            if tag.name not in self._tags:
                self._tags[tag.name] = np.full(self._uid.size, _ABSENT, object)
            at = slots[np.frombuffer(tag.rows, "<i4")] if tag.rows else slots
            self._tags[tag.name][at] = [self._pooled(value) if type(value) is str else value for value in tag.values]

    # -- columns
    def place(self, names: Iterable[str], slots: Ints, block: int) -> Places:
        """The columns of the rows are now in rows 0.. of a block; returns where they were before."""
        before: Places = []
        rows = np.arange(slots.size)
        for cells, columns in self._families_of(names):
            before.append((_overwrite(cells, slots, block), columns))
            cells.row[slots] = rows
        return before

    def move(self, source: int, rows: Ints, target: int) -> int:
        """Cells in rows `rows` (ascending) of one block are now in rows 0.. of another; returns how many there are."""
        moved = 0
        for cells in self._families:
            at = np.flatnonzero(cells.block == source)
            cells.row[at] = np.searchsorted(rows, cells.row[at])
            cells.block[at] = target
            moved += int(at.size) * cells.columns
        return moved

    def lose(self, blocks: Ints) -> Ints:
        """The blocks are gone with all that lay in them; returns the rows that lost columns."""
        hit: list[Ints] = []
        for cells in self._families:
            slots = np.flatnonzero(np.isin(cells.block, blocks))
            cells.block[slots] = 0
            names = [name for name, family in self.columns.items() if family is cells]
            for key in self.keys(slots):
                self.lost.setdefault(key, set()).update(names)
            hit.append(slots)
        return np.unique(np.concatenate(hit)) if hit else np.zeros(0, np.int64)

    def found_again(self, keys: Iterable[str], names: Iterable[str]) -> None:
        """The columns of the rows were written anew."""
        for key in keys if self.lost else ():
            still = self.lost.get(key, set()).difference(names)
            self.lost.pop(key, None)
            if still:
                self.lost[key] = still

    def fields(self, slots: Ints) -> tuple[str, ...]:
        """Columns that all the rows have; none if there are no rows."""
        if not slots.size:
            return ()
        whole = {id(cells) for cells in self._families if bool((cells.block[slots] != 0).all())}
        return tuple(name for name, cells in self.columns.items() if id(cells) in whole)

    def produced(self, slots: Ints, fields: Sequence[str]) -> Bools:
        """Which rows have which columns, [N, F]."""
        flags = np.zeros((slots.size, len(fields)), np.bool_)
        for i, name in enumerate(fields):
            if name in self.columns:
                flags[:, i] = self.columns[name].block[slots] != 0
        return flags

    # -- readiness
    def ready(self, slots: Ints | slice, fields: Sequence[str], where: Mapping[str, Scalar], task: str | None) -> Bools:
        """Which of the rows have all `fields`, all tags of `where`, and are not consumed by `task`."""
        mask = self._alive[slots].copy()
        if task is not None and task in self._consumed:
            mask &= ~self._consumed[task][slots]
        if not mask.any():
            return mask
        if not all(name in self.columns for name in fields) or not all(name in self._tags for name in where):
            return np.zeros_like(mask)
        for cells in {id(self.columns[name]): self.columns[name] for name in fields}.values():
            mask &= cells.block[slots] != 0
        for name, value in where.items():
            at = np.flatnonzero(mask)
            mask[at] = (self._tags[name][slots][at] == value).astype(np.bool_)
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

    def consume(self, slots: Ints, task: str, value: bool) -> None:
        """Mark the rows as consumed by `task`, or as not consumed."""
        if task not in self._consumed:
            self._consumed[task] = np.zeros(self._uid.size, np.bool_)
        self._consumed[task][slots] = value

    def consumed(self, slots: Ints, task: str) -> Bools:
        """Which of the rows are consumed by `task`."""
        if task not in self._consumed:
            return np.zeros(slots.size, np.bool_)
        return self._consumed[task][slots]

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks that consumed rows."""
        return tuple(self._consumed)

    # -- changes
    def touch(self, slots: Ints, version: int) -> None:
        """The rows changed."""
        self._changed[slots] = version
        self.version = version

    def knows(self, since: int) -> bool:
        """Whether everything that was cleared after that version is still remembered."""
        return since >= self._forgotten

    def changed(self, since: int) -> Ints:
        """Rows that changed after that version, least recent change first."""
        slots = np.flatnonzero((self._changed[: len(self._keys)] > since) & self._alive[: len(self._keys)])
        return slots[np.argsort(self._changed[slots], kind="stable")]

    def removed(self, since: int) -> list[str]:
        """Rows that were cleared after that version and are not there now."""
        gone: dict[str, None] = {}
        for version, key in reversed(self._removed):
            if version <= since:
                break
            if key not in self._index:
                gone[key] = None
        return list(gone)

    # -- inner
    def _pooled(self, text: str) -> str:
        """Equal short texts are kept once."""
        if len(text) > _POOLED_CHARACTERS:
            return text
        if len(self._pool) >= _POOLED:
            self._pool = {}
        return self._pool.setdefault(text, text)

    def _families_of(self, names: Iterable[str]) -> list[tuple[Cells, int]]:
        """The cells of exactly these columns, and how many columns each stands for."""
        groups: dict[int, list[str]] = {}
        for name in names:
            groups.setdefault(id(self.columns[name]) if name in self.columns else 0, []).append(name)
        out: list[tuple[Cells, int]] = []
        for members in groups.values():
            shared = self.columns.get(members[0])
            if shared is None or shared.columns > len(members):
                own = Cells(self._uid.size)
                self._families.append(own)
                if shared is not None:
                    own.block[:], own.row[:] = shared.block, shared.row
                    shared.columns -= len(members)
                own.columns = len(members)
                self.columns.update(dict.fromkeys(members, own))
                shared = own
            out.append((shared, len(members)))
        return out

    def _reserve(self, extra: int) -> None:
        if len(self._keys) + extra <= self._uid.size:
            return
        if len(self._index) * 2 <= len(self._keys):
            self._pack()
        need = len(self._keys) + extra
        if need > self._uid.size:
            size = max(need, self._uid.size + self._uid.size // 2)
            self._each_array(lambda array: _grown(array, size))

    def _pack(self) -> None:
        live = self.slots()

        def moved(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return _grown(array[live], array.size)

        self._keys = list(self.keys(live))
        self._families = [cells for cells in self._families if cells.block[live].any()]
        kept = set(map(id, self._families))
        self.columns = {name: cells for name, cells in self.columns.items() if id(cells) in kept}
        self._each_array(moved)
        self._index = {key: slot for slot, key in enumerate(self._keys)}

    def _each_array(self, change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> None:
        self._uid, self._alive, self._changed = change(self._uid), change(self._alive), change(self._changed)
        self._consumed = {task: change(array) for task, array in self._consumed.items()}
        self._tags = {name: change(array) for name, array in self._tags.items()}
        for cells in self._families:
            cells.block, cells.row = change(cells.block), change(cells.row)


def _overwrite(cells: Cells, slots: Ints, block: int) -> Ints:
    if slots.size == 1:
        slot = int(slots[0])
        was = int(cells.block[slot])
        cells.block[slot] = block
        return np.array([was]) if was else _NOWHERE
    before = cells.block[slots]
    cells.block[slots] = block
    return _NOWHERE if not before.any() else before[before != 0].astype(np.int64)


def _grown(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """The array with nothing behind it up to `size`; memory that is not used yet is not touched where that is possible."""
    out = np.full(size, _ABSENT, object) if array.dtype == object else np.zeros(size, array.dtype)
    out[: array.size] = array
    return out
