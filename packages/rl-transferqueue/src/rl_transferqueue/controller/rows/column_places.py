"""Where the columns of the rows of one partition lie, by slot.

Columns that were always written together share one `Cells`; a million values in sixteen such
columns cost the memory of one column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rl_transferqueue.controller.rows.slot_arrays import Resize
from rl_transferqueue.wire.arrays import Bools, Ints

Places: TypeAlias = list[tuple[Ints, int]]
"""(block slots of cells [M], columns that those cells stand for)."""

ON_DISK = -1
"""In place of a block's slot: the journal has the column, memory has not."""
_NOWHERE: Ints = np.zeros(0, np.int64)
_FIRST: Ints = np.zeros(1, np.int64)


class Cells:
    """Where `columns` columns lie: per slot the block's slot (0: not there; or `ON_DISK`) and the
    row in that block."""

    def __init__(self, slots: int) -> None:
        self.columns = 0
        self.block: npt.NDArray[np.int32] = np.zeros(slots, np.int32)
        self.row: npt.NDArray[np.int32] = np.zeros(slots, np.int32)


class ColumnPlaces:
    """The cells of all columns.

    Args:
        slots: how many slots there are.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._families: list[Cells] = []
        self.cells: dict[str, Cells] = {}
        """By column."""
        self.lost: dict[str, set[str]] = {}
        """key -> columns that were in a storage unit that has ended, and were not written since."""

    def place(self, names: Sequence[str], slots: Ints, block: int, rows: Ints | None = None) -> Places:
        """The columns of the rows are now in rows `rows` (default: 0..) of a block; returns where
        they were before."""
        before: Places = []
        if rows is None:
            rows = np.arange(slots.size) if slots.size > 1 else _FIRST
        for cells, columns in self._families_of(names):
            before.append((_overwrite(cells, slots, block), columns))
            cells.row[slots] = rows
        return before

    def move(self, source: int, rows: Ints, target: int) -> int:
        """Cells in rows `rows` (ascending) of one block are now in rows 0.. of another; returns how
        many there are."""
        moved = 0
        for cells in self._families:
            at = np.flatnonzero(cells.block == source)
            cells.row[at] = np.searchsorted(rows, cells.row[at])
            cells.block[at] = target
            moved += int(at.size) * cells.columns
        return moved

    def unload(self, slots: Ints, block: int | None = None) -> Places:
        """Move the columns of the rows out of memory, or those of them in one block; returns where
        they were."""
        before: Places = []
        for cells in self._families:
            there = slots[cells.block[slots] > 0 if block is None else cells.block[slots] == block]
            before.append((_overwrite(cells, there, ON_DISK), cells.columns))
        return before

    def blocks_of(self, slots: Ints, names: Iterable[str]) -> list[int]:
        """Slots of the blocks in memory with one of these columns of the rows, ascending."""
        families = {id(it): it for name in names if (it := self.cells.get(name)) is not None}
        found = {block for cells in families.values() for block in np.unique(cells.block[slots]).tolist()}
        return sorted(block for block in found if block > 0)

    def rows_in(self, block: int, slots: Ints) -> Ints:
        """Those of the slots whose rows have a column in a block."""
        mask = np.zeros(slots.size, np.bool_)
        for cells in self._families:
            mask |= cells.block[slots] == block
        return slots[mask]

    def on_disk(self, slots: Ints, names: Iterable[str]) -> Bools:
        """Which rows have one of these columns on the disk alone."""
        mask = np.zeros(slots.size, np.bool_)
        for cells in {id(it): it for name in names if (it := self.cells.get(name)) is not None}.values():
            mask |= cells.block[slots] == ON_DISK
        return mask

    def load(self, names: Sequence[str], slots: Ints, block: int, rows: Ints) -> int:
        """Those of the columns that were on the disk alone are now in these rows of a block;
        returns how many cells these are."""
        loaded = 0
        for cells, columns in self._families_of(names):
            away = cells.block[slots] == ON_DISK
            cells.block[slots[away]] = block
            cells.row[slots[away]] = rows[away]
            loaded += int(np.count_nonzero(away)) * columns
        return loaded

    def remove(self, slots: Ints, keys: Iterable[str]) -> Places:
        """Remove the rows; returns where their cells were."""
        for key in keys if self.lost else ():
            self.lost.pop(key, None)
        return [(_overwrite(cells, slots, 0), cells.columns) for cells in self._families]

    def lose(self, blocks: Ints, keys_of: Callable[[Ints], Sequence[str]]) -> Ints:
        """Drop all cells in blocks that are gone; returns the rows that lost columns."""
        hit: list[Ints] = []
        for cells in self._families:
            slots = np.flatnonzero(np.isin(cells.block, blocks))
            cells.block[slots] = 0
            names = [name for name, family in self.cells.items() if family is cells]
            for key in keys_of(slots):
                self.lost.setdefault(key, set()).update(names)
            hit.append(slots)
        return np.unique(np.concatenate(hit)) if hit else np.zeros(0, np.int64)

    def recover(self, keys: Iterable[str], names: Iterable[str]) -> None:
        """The columns of the rows were written again: they are not lost any more."""
        for key in keys if self.lost else ():
            still = self.lost.get(key, set()).difference(names)
            self.lost.pop(key, None)
            if still:
                self.lost[key] = still

    def common(self, slots: Ints) -> tuple[str, ...]:
        """Columns that all the rows have; none if there are no rows."""
        if not slots.size:
            return ()
        whole = {id(cells) for cells in self._families if bool((cells.block[slots] != 0).all())}
        return tuple(name for name, cells in self.cells.items() if id(cells) in whole)

    def produced(self, slots: Ints, fields: Sequence[str]) -> Bools:
        """Which rows have which columns, [N, F]."""
        flags = np.zeros((slots.size, len(fields)), np.bool_)
        for i, name in enumerate(fields):
            if name in self.cells:
                flags[:, i] = self.cells[name].block[slots] != 0
        return flags

    def drop_unused(self, live: Ints) -> None:
        """Forget columns that none of the live rows has."""
        self._families = [cells for cells in self._families if cells.block[live].any()]
        kept = set(map(id, self._families))
        self.cells = {name: cells for name, cells in self.cells.items() if id(cells) in kept}

    def resize(self, slots: int, change: Resize) -> None:
        """There are `slots` slots from now on; `change` brings each array to its new form."""
        self._slots = slots
        for cells in self._families:
            cells.block, cells.row = change(cells.block), change(cells.row)

    def _families_of(self, names: Sequence[str]) -> list[tuple[Cells, int]]:
        """The cells of exactly these columns, and how many columns each stands for."""
        whole = self.cells.get(names[0]) if names else None
        if (
            whole is not None
            and whole.columns == len(names)
            and (len(names) == 1 or all(self.cells.get(name) is whole for name in names))
        ):
            return [(whole, len(names))]
        groups: dict[int, list[str]] = {}
        for name in names:
            groups.setdefault(id(self.cells[name]) if name in self.cells else 0, []).append(name)
        out: list[tuple[Cells, int]] = []
        for members in groups.values():
            shared = self.cells.get(members[0])
            if shared is None or shared.columns > len(members):
                own = Cells(self._slots)
                self._families.append(own)
                if shared is not None:
                    own.block[:], own.row[:] = shared.block, shared.row
                    shared.columns -= len(members)
                own.columns = len(members)
                self.cells.update(dict.fromkeys(members, own))
                shared = own
            out.append((shared, len(members)))
        return out


def _overwrite(cells: Cells, slots: Ints, block: int) -> Ints:
    """Set the block of the cells; returns the blocks in which they were."""
    if slots.size == 1:
        slot = int(slots[0])
        was = int(cells.block[slot])
        cells.block[slot] = block
        return np.array([was]) if was > 0 else _NOWHERE
    before = cells.block[slots]
    cells.block[slots] = block
    return _NOWHERE if not before.any() else before[before > 0].astype(np.int64)
