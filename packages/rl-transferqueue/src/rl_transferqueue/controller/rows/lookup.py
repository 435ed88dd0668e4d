"""Finding rows and the places of their columns, or saying what is missing."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np

from rl_protocol.counted import counted
from rl_protocol.errors import DataLostError, MissingDataError
from rl_transferqueue.controller.rows.block_table import Block
from rl_transferqueue.controller.rows.column_places import Cells
from rl_transferqueue.controller.rows.partition_rows import PartitionTable
from rl_transferqueue.wire.arrays import Ints

_INT32 = struct.Struct("<i")


def existing_slots(table: PartitionTable, partition: str, keys: tuple[str, ...], generations: Ints | None) -> Ints:
    """Slots of rows that must be there, in these generations (0: any) where given.

    Raises:
        MissingDataError: a row is not there, or is of another generation.
    """
    slots, missing = table.find(keys)
    if not missing and generations is not None:
        other = (generations != 0) & (table.generations(slots) != generations)
        missing = [keys[i] for i in np.flatnonzero(other).tolist()] if other.any() else []
    if missing:
        raise MissingDataError(
            f"{counted(len(missing), 'row')} not in partition {partition!r}, or replaced since; the first is {missing[0]!r}."
        )
    return slots


def cells_of(
    table: PartitionTable, partition: str, slots: Ints, keys: tuple[str, ...], fields: Sequence[str]
) -> list[Cells]:
    """The cells of each column, which all rows must have.

    Raises:
        MissingDataError, DataLostError: a row lacks a column.
    """
    found = {name: table.columns.cells[name] for name in fields if name in table.columns.cells}
    whole = {
        number for number, cells in {id(cells): cells for cells in found.values()}.items() if cells.block[slots].all()
    }
    for name in fields:
        if name not in found or id(found[name]) not in whole:
            raise _lacking(table, partition, slots, keys, name)
    return [found[name] for name in fields]


def places_of(
    cells: Sequence[Cells], slots: Ints
) -> tuple[list[int], tuple[tuple[bytes, bytes], ...], tuple[int, ...]]:
    """The block slots in use, ascending; and `Located.places` and `Located.place_of`."""
    distinct = {id(family): family for family in cells}
    order = {number: i for i, number in enumerate(distinct)}
    place_of = tuple(order[id(family)] for family in cells)
    if slots.size == 1:
        slot = int(slots[0])
        inside = [(int(family.block[slot]), int(family.row[slot])) for family in distinct.values()]
        used = sorted({block for block, _ in inside})
        return used, tuple((_INT32.pack(used.index(block)), _INT32.pack(row)) for block, row in inside), place_of
    blocks = [family.block[slots] for family in distinct.values()]
    found = np.unique(np.concatenate([*blocks, np.zeros(0, np.int32)]))
    places = tuple(
        (np.searchsorted(found, block).astype("<i4").tobytes(), family.row[slots].astype("<i4").tobytes())
        for block, family in zip(blocks, distinct.values(), strict=True)
    )
    return found.tolist(), places, place_of


def bytes_by_unit(table: PartitionTable, slots: Ints, blocks: Mapping[int, Block]) -> dict[int, Ints]:
    """Bytes [N] of the rows in the blocks of each storage unit: of each block an equal part per
    cell.
    """
    found: dict[int, Ints] = {}
    for cells in {id(cells): cells for cells in table.columns.cells.values()}.values():
        used, which = np.unique(cells.block[slots], return_inverse=True)
        inside = [blocks.get(place) for place in used.tolist()]  # none: not there, or on the disk
        share = np.array([it.ref.span.nbytes * cells.columns // it.cells if it else 0 for it in inside], np.int64)
        units = np.array([it.ref.span.unit if it else -1 for it in inside], np.int64)
        for unit in np.unique(units[units >= 0]).tolist():
            nbytes = found.setdefault(unit, np.zeros(slots.size, np.int64))
            nbytes += np.where(units == unit, share, 0)[which]
    return found


def _lacking(
    table: PartitionTable, partition: str, slots: Ints, keys: tuple[str, ...], name: str
) -> MissingDataError | DataLostError:
    absent = np.flatnonzero(~table.columns.produced(slots, (name,))[:, 0])
    for i in absent.tolist() if table.columns.lost else ():
        if name in table.columns.lost.get(keys[i], ()):
            return DataLostError(
                f"Column {name!r} of row {keys[i]!r} of partition {partition!r} was lost with a storage unit that has ended; put it again."
            )
    first = int(absent[0]) if absent.size else 0
    there = sorted(table.columns.common(slots[first : first + 1]))
    return MissingDataError(
        f"Row {keys[first] if keys else ''!r} of partition {partition!r} has no column {name!r}; it has {there} "
        f"({absent.size} of {slots.size} rows lack it)."
    )
