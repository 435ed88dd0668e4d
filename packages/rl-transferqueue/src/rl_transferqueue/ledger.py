"""What the controller knows: rows, tags, where columns lie, who waits for what. Pure: no clock, no socket, never a tensor.

Every operation checks all of its arguments before it changes anything. What others must do afterwards (memory that became free, blocks to
compact, leases that only keep what nobody needs) is collected in `blocks` and taken by the caller.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from rl_protocol.errors import (
    UNREADABLE,
    BatchError,
    ConflictError,
    DataLostError,
    DuplicateKeyError,
    MissingDataError,
    WireError,
)
from rl_protocol.meta import Scalar
from rl_protocol.wire import Header
from rl_transferqueue.blocks import Block, BlockTable
from rl_transferqueue.board import Board
from rl_transferqueue.header_cache import unpack_header
from rl_transferqueue.messages import Changes, Flags, Located, Measure, Rows, Span, TagColumn
from rl_transferqueue.table import Bools, Cells, Ints, PartitionTable

_INT32 = struct.Struct("<i")
_PRIVATE_SLOTS = 1 << 16
_PARTED = 4096
"""Partitions that were emptied and are remembered for those who watch, at most ..."""
_PARTED_CHARACTERS = 1 << 20
"""... and characters of their names, at most."""


@dataclass(eq=False, kw_only=True, slots=True)
class Waiter:
    """Someone who waits for rows. `token` is the caller's own; `ready` counts the rows that fulfil the wish now."""

    partition: str
    count: int
    fields: tuple[str, ...]
    where: Mapping[str, Scalar]
    task: str | None
    token: object
    ready: int = 0


@dataclass(eq=False, kw_only=True, slots=True)
class Watcher:
    """Someone who waits for changes after version `since`. `token` is the caller's own."""

    partition: str
    since: int
    where: Mapping[str, Scalar]
    token: object


Served: TypeAlias = list[tuple[Waiter, Rows] | tuple[Watcher, Changes]]


@dataclass(slots=True)
class _Parked:
    """Who waits at one partition."""

    waiters: list[Waiter] = field(default_factory=list[Waiter])
    watchers: list[Watcher] = field(default_factory=list[Watcher])


class Ledger:
    """State of a plane.

    >>> ledger = Ledger()
    >>> ledger.commit("train", ("a", "b"), (TagColumn("n", (1, 2)),))
    (array([1, 2]), [])
    >>> ledger.list_rows("train", {"n": 2}).keys
    ('b',)
    """

    def __init__(self, board: Board | None = None) -> None:
        self._partitions: dict[str, PartitionTable] = {}
        self._parked: dict[str, _Parked] = {}
        self._parted: dict[str, int] = {}
        """Version at which a partition that is not there was emptied."""
        self._parted_characters = 0
        self._next_uid = 1
        self._version = 1
        self.blocks = BlockTable(board or Board(_PRIVATE_SLOTS))

    def row_counts(self) -> dict[str, int]:
        """partition -> number of rows."""
        return {name: len(table) for name, table in self._partitions.items()}

    def lost(self) -> dict[str, tuple[str, ...]]:
        """partition -> rows that lost columns with a storage unit."""
        return {name: tuple(table.lost) for name, table in self._partitions.items() if table.lost}

    def columns(self) -> dict[str, tuple[str, ...]]:
        """partition -> columns that some row has or had."""
        return {name: tuple(table.columns) for name, table in self._partitions.items()}

    def tasks(self) -> dict[str, tuple[str, ...]]:
        """partition -> tasks that consumed rows."""
        return {name: tuple(sorted(table.tasks)) for name, table in self._partitions.items()}

    # -- writing
    def commit(
        self,
        partition: str,
        keys: tuple[str, ...],
        tags: Sequence[TagColumn] = (),
        block: Span | None = None,
        header: bytes = b"",
        expect: Sequence[Mapping[str, Scalar] | None] | None = None,
    ) -> tuple[Ints, Served]:
        """Add rows, tags and the columns of a block; returns the rows' uids and those who are served by it.

        Raises:
            DuplicateKeyError, BatchError, ConflictError, WireError: nothing was changed, the block was not taken.
        """
        spec = _check_commit(keys, tags, block, header, expect)
        if expect is not None:
            self._check_expected(partition, keys, expect)
        if not keys:
            return np.zeros(0, np.int64), []
        table = self._partitions.get(partition)
        if table is None:
            table = self._partitions[partition] = PartitionTable(self._version)
            self._forget_parted(partition)
        slots, new = table.add(keys, self._next_uid)
        self._next_uid += len(keys)
        before = self._count_ready(partition, table, slots, new)
        table.merge_tags(slots, tags)
        if block is not None and spec is not None:
            names = [column.name for column in spec.columns]
            made = self.blocks.add(block, header, partition, len(keys) * len(names))
            self.blocks.drop_cells(table.place(names, slots, made.ref.slot))
            table.found_again(keys, names)
        self._touch(table, slots)
        return table.uids(slots), self._serve(partition, table, slots, before)

    def clear(self, partition: str, keys: Sequence[str] | None) -> tuple[int, Served]:
        """Remove rows; returns how many there were, and the watchers that are served by it."""
        table = self._partitions.get(partition)
        if table is None:
            return 0, []
        slots = table.slots() if keys is None else np.unique(table.find(keys)[0])
        if not slots.size:
            return 0, []
        before = self._count_ready(partition, table, slots)
        self._touch(table, slots)
        self.blocks.drop_cells(table.remove(slots))
        for waiter, count in before.items():
            waiter.ready -= count
        served = self._serve_watchers(partition)
        if not len(table):
            del self._partitions[partition]
            self._parted[partition] = self._version
            self._parted_characters += len(partition)
            while len(self._parted) > _PARTED or self._parted_characters > _PARTED_CHARACTERS:
                self._forget_parted(next(iter(self._parted)))
        return int(slots.size), served

    def lose_unit(self, unit: int) -> Served:
        """A storage unit has ended with all columns in it."""
        blocks = self.blocks.lose(unit)
        served: Served = []
        for partition, table in self._partitions.items():
            slots = table.lose(blocks)
            if slots.size:
                self._touch(table, slots)
                for waiter in self._parked.get(partition, _Parked()).waiters:
                    waiter.ready = int(table.find_ready(waiter.fields, waiter.where, waiter.task).size)
                served += self._serve_watchers(partition)
        return served

    # -- reading
    def locate(
        self,
        session: bytes,
        lease: int,
        partition: str,
        keys: tuple[str, ...],
        fields: tuple[str, ...],
        uids: Ints | None = None,
    ) -> Located:
        """Where the columns are; the blocks are held by the lease.

        Raises:
            MissingDataError: rows or columns that are not there.
            WireError: the lease exists already.
        """
        if self.blocks.has_lease(session, lease):
            raise WireError(f"Lease {lease} of this session exists already.")
        table = self._partitions.get(partition) or PartitionTable()
        slots = _existing(table, partition, keys, uids)
        used, places, place_of = _places(_cells(table, partition, slots, keys, fields), slots)
        blocks = [self.blocks.blocks[slot] for slot in used]
        headers: dict[bytes, int] = {}
        header_of = tuple(headers.setdefault(block.header, len(headers)) for block in blocks)
        if blocks:
            self.blocks.lease(session, lease, used)
        return Located(
            blocks=tuple(block.ref for block in blocks),
            epochs=self.blocks.board.epochs(np.array(used, dtype=np.int64)).astype("<i8").tobytes(),
            headers=tuple(headers),
            header_of=header_of,
            places=places,
            place_of=place_of,
        )

    def list_rows(
        self,
        partition: str,
        where: Mapping[str, Scalar],
        fields: Sequence[str] = (),
        task: str | None = None,
        keys: tuple[str, ...] | None = None,
    ) -> Rows:
        """The rows (oldest first) or those of `keys` (in that order) with the tags of `where` and all `fields`, not consumed by `task`.

        Raises:
            MissingDataError: one of `keys` is not there.
        """
        table = self._partitions.get(partition) or PartitionTable()
        whole = not where and not fields and task is None
        if keys is None:
            return _describe(table, table.slots() if whole else table.find_ready(fields, where, task))
        slots = _existing(table, partition, keys, None)
        return _describe(table, slots if whole else slots[table.ready(slots, fields, where, task)])

    def consumption(self, partition: str, task: str) -> Flags:
        """Which rows are consumed by the task."""
        table = self._partitions.get(partition) or PartitionTable()
        slots = table.slots()
        return Flags(table.keys(slots), table.consumed(slots, task).tobytes())

    def production(self, partition: str, fields: Sequence[str]) -> Flags:
        """Which rows have which columns."""
        table = self._partitions.get(partition) or PartitionTable()
        slots = table.slots()
        return Flags(table.keys(slots), table.produced(slots, fields).tobytes())

    # -- waiting
    def wait(self, waiter: Waiter) -> Rows | None:
        """The rows if they are there; else the waiter is kept and served by a later change."""
        table = self._partitions.get(waiter.partition) or PartitionTable()
        slots = table.find_ready(waiter.fields, waiter.where, waiter.task, waiter.count)
        if slots.size >= waiter.count:
            return self._hand_out(waiter, table, slots)
        waiter.ready = int(slots.size)
        self._parked.setdefault(waiter.partition, _Parked()).waiters.append(waiter)
        return None

    def watch(self, watcher: Watcher) -> Changes | None:
        """The changes if there are any; else the watcher is kept and served by a later change."""
        changes = self.changes(watcher)
        if watcher.since == 0 or changes.reset or changes.removed or changes.rows.keys:
            return changes
        self._parked.setdefault(watcher.partition, _Parked()).watchers.append(watcher)
        return None

    def changes(self, watcher: Watcher) -> Changes:
        """What changed after the watcher's version, be it nothing."""
        partition, since = watcher.partition, watcher.since
        table = self._partitions.get(partition)
        if table is None:
            reset = since == 0 or since < self._parted.get(partition, 0)
            return Changes(
                _describe(PartitionTable(), np.zeros(0, np.int64)), (), self._version if reset else since, reset
            )
        if since >= table.version:
            return Changes(_describe(table, np.zeros(0, np.int64)), (), since, reset=False)
        reset = since == 0 or not table.knows(since)
        slots = table.changed(0 if reset else since)
        shown = table.ready(slots, (), watcher.where, None) if watcher.where else np.ones(slots.size, np.bool_)
        removed = () if reset else (*table.removed(since), *table.keys(slots[~shown]))
        return Changes(_describe(table, slots[shown]), removed, self._version, reset)

    def forget(self, who: Waiter | Watcher) -> None:
        """The waiter has left; no error if it was served."""
        parked = self._parked.get(who.partition)
        if parked is None:
            return
        if isinstance(who, Waiter):
            parked.waiters = [other for other in parked.waiters if other is not who]
        else:
            parked.watchers = [other for other in parked.watchers if other is not who]
        if not parked.waiters and not parked.watchers:
            del self._parked[who.partition]

    # -- consuming
    def claim(self, partition: str, keys: tuple[str, ...], task: str) -> Rows:
        """Mark the rows as consumed.

        Raises:
            MissingDataError, ConflictError, DuplicateKeyError: nothing was changed.
        """
        _check_unique(keys)
        table = self._partitions.get(partition) or PartitionTable()
        slots = _existing(table, partition, keys, None)
        taken = np.flatnonzero(table.consumed(slots, task))
        if taken.size:
            raise ConflictError(
                f"Row {keys[int(taken[0])]!r} of partition {partition!r} is consumed by task {task!r} already ({taken.size} of "
                f"{len(keys)} rows are); list what is left and choose again."
            )
        self._consume(partition, table, slots, task)
        return _describe(table, slots)

    def give_back(self, partition: str, task: str, uids: Ints) -> Served:
        """Rows that were handed out to a caller that has left; those that still exist can be handed out again."""
        table = self._partitions.get(partition)
        if table is None:
            return []
        return self._unconsume(partition, table, table.find_uids(uids), [task])[1]

    def reset_consumption(self, partition: str, task: str | None, keys: Sequence[str] | None) -> tuple[Ints, Served]:
        """Rows may be handed out again; returns the uids of those that had been consumed, and those who are served by it."""
        table = self._partitions.get(partition)
        if table is None:
            return np.zeros(0, np.int64), []
        slots = table.slots() if keys is None else np.unique(table.find(keys)[0])
        return self._unconsume(partition, table, slots, table.tasks if task is None else [task])

    # -- compaction
    def plan_compaction(self, block: Block) -> Measure:
        """What to copy out of a sparse block."""
        used: dict[str, Ints] = {}
        table = self._partitions.get(block.partition) or PartitionTable()
        for column in unpack_header(block.header).columns:
            cells = table.columns.get(column.name)
            rows = cells.row[cells.block == block.ref.slot] if cells is not None else np.zeros(0, np.int32)
            if rows.size:
                used[column.name] = rows.astype(np.int64)
        rows = np.unique(np.concatenate(list(used.values()))) if used else np.zeros(0, np.int64)
        return Measure(block.ref.span, block.header, rows.astype("<i8").tobytes(), tuple(used))

    def end_compaction(
        self, block: Block, plan: Measure, copy: tuple[Span, bytes] | None, *, no_gain: bool = False
    ) -> None:
        """What still lies in the old block moves to the copy (place, header), if there is one; else the block stays as it is."""
        if copy is not None:
            rows = np.frombuffer(plan.rows, "<i8")
            made = self.blocks.add(*copy, block.partition, rows.size * len(plan.fields))
            table = self._partitions.get(block.partition)
            moved = table.move(block.ref.slot, rows, made.ref.slot) if table is not None else 0
            lost, made.full_cells = made.cells - moved, moved
            self.blocks.drop_cells([(np.full(moved, block.ref.slot), 1), (np.full(lost, made.ref.slot), 1)])
        elif no_gain:
            block.full_cells = block.cells
        self.blocks.end_compaction(block, failed=copy is None and not no_gain)

    # -- inner
    def _forget_parted(self, partition: str) -> None:
        if self._parted.pop(partition, None) is not None:
            self._parted_characters -= len(partition)

    def _touch(self, table: PartitionTable, slots: Ints) -> None:
        self._version += 1
        table.touch(slots, self._version)

    def _check_expected(
        self, partition: str, keys: tuple[str, ...], expect: Sequence[Mapping[str, Scalar] | None]
    ) -> None:
        table = self._partitions.get(partition) or PartitionTable()
        for key, wanted in zip(keys, expect, strict=True):
            found, _ = table.find((key,))
            has = table.tags_of(int(found[0])) if found.size else None
            fits = has is None if wanted is None else has is not None and _has(has, wanted)
            if not fits:
                wish = "be absent" if wanted is None else f"have the tags {dict(wanted)}"
                is_ = "it is not there" if has is None else f"it has {has}"
                raise ConflictError(f"Row {key!r} of partition {partition!r} was expected to {wish}; {is_}.", key=key)

    def _count_ready(
        self, partition: str, table: PartitionTable, slots: Ints, but: Bools | None = None
    ) -> dict[Waiter, int]:
        """For each waiter, how many of the rows fulfil its wish now; those marked in `but` do not count."""
        counts: dict[Waiter, int] = {}
        if partition not in self._parked:
            return counts
        for waiter in self._parked[partition].waiters:
            ready = table.ready(slots, waiter.fields, waiter.where, waiter.task)
            counts[waiter] = int(np.count_nonzero(ready if but is None else ready & ~but))
        return counts

    def _serve(self, partition: str, table: PartitionTable, slots: Ints, before: Mapping[Waiter, int]) -> Served:
        """After the rows changed: count anew and serve who has enough, in order of arrival."""
        if partition not in self._parked:
            return []
        for waiter, count in self._count_ready(partition, table, slots).items():
            waiter.ready += count - before[waiter]
        served: Served = []
        for waiter in list(before):
            if waiter.ready >= waiter.count:
                self.forget(waiter)
                oldest = table.find_ready(waiter.fields, waiter.where, waiter.task, waiter.count)
                served.append((waiter, self._hand_out(waiter, table, oldest)))
        return served + self._serve_watchers(partition)

    def _serve_watchers(self, partition: str) -> Served:
        served: Served = []
        if partition not in self._parked:
            return served
        for watcher in list(self._parked[partition].watchers):
            changes = self.changes(watcher)
            if changes.reset or changes.removed or changes.rows.keys:
                self.forget(watcher)
                served.append((watcher, changes))
        return served

    def _hand_out(self, waiter: Waiter, table: PartitionTable, slots: Ints) -> Rows:
        if waiter.task is not None and slots.size:
            self._consume(waiter.partition, table, slots, waiter.task)
        return _describe(table, slots)

    def _consume(self, partition: str, table: PartitionTable, slots: Ints, task: str) -> None:
        before = self._count_ready(partition, table, slots)
        table.consume(slots, task, True)
        for waiter, count in before.items():
            if waiter.task == task:
                waiter.ready -= count

    def _unconsume(
        self, partition: str, table: PartitionTable, slots: Ints, tasks: Sequence[str]
    ) -> tuple[Ints, Served]:
        before = self._count_ready(partition, table, slots)
        consumed = np.zeros(slots.size, np.bool_)
        for task in tasks:
            consumed |= table.consumed(slots, task)
            table.consume(slots, task, False)
        return table.uids(slots[consumed]), self._serve(partition, table, slots, before)


def _describe(table: PartitionTable, slots: Ints) -> Rows:
    uids = table.uids(slots).astype("<i8").tobytes()
    return Rows(table.keys(slots), table.tags(slots), table.fields(slots), uids)


def _existing(table: PartitionTable, partition: str, keys: tuple[str, ...], uids: Ints | None) -> Ints:
    slots, missing = table.find(keys)
    if not missing and uids is not None:
        other = (uids != 0) & (table.uids(slots) != uids)
        missing = [keys[i] for i in np.flatnonzero(other).tolist()] if other.any() else []
    if missing:
        raise MissingDataError(
            f"{len(missing)} rows are not in partition {partition!r}, or were made anew since; the first is {missing[0]!r}."
        )
    return slots


def _cells(
    table: PartitionTable, partition: str, slots: Ints, keys: tuple[str, ...], fields: Sequence[str]
) -> list[Cells]:
    """The cells of each column, all of which all rows have."""
    found = {name: table.columns[name] for name in fields if name in table.columns}
    whole = {
        number for number, cells in {id(cells): cells for cells in found.values()}.items() if cells.block[slots].all()
    }
    for name in fields:
        if name not in found or id(found[name]) not in whole:
            raise _lacking(table, partition, slots, keys, name)
    return [found[name] for name in fields]


def _lacking(
    table: PartitionTable, partition: str, slots: Ints, keys: tuple[str, ...], name: str
) -> MissingDataError | DataLostError:
    absent = np.flatnonzero(~table.produced(slots, (name,))[:, 0])
    for i in absent.tolist() if table.lost else ():
        if name in table.lost.get(keys[i], ()):
            return DataLostError(
                f"Column {name!r} of row {keys[i]!r} of partition {partition!r} was lost with a storage unit that has ended; put it again."
            )
    first = int(absent[0]) if absent.size else 0
    there = sorted(table.fields(slots[first : first + 1]))
    return MissingDataError(
        f"Row {keys[first] if keys else ''!r} of partition {partition!r} has no column {name!r}; it has {there} "
        f"({absent.size} of {slots.size} rows lack it)."
    )


def _places(cells: Sequence[Cells], slots: Ints) -> tuple[list[int], tuple[tuple[bytes, bytes], ...], tuple[int, ...]]:
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


def _has(tags: Mapping[str, Scalar], wanted: Mapping[str, Scalar]) -> bool:
    return all(name in tags and tags[name] == value for name, value in wanted.items())


def _rows_fit(tag: TagColumn, size: int) -> bool:
    if len(tag.rows) != 4 * len(tag.values):
        return False
    rows = np.frombuffer(tag.rows, "<i4")
    return bool((rows >= 0).all() and (rows < size).all())


def _check_unique(keys: tuple[str, ...]) -> None:
    if len(keys) > 1 and len(set(keys)) != len(keys):
        raise DuplicateKeyError("A key occurs more than once in one call; keys must be unique.")


def _check_commit(
    keys: tuple[str, ...],
    tags: Sequence[TagColumn],
    block: Span | None,
    header: bytes,
    expect: Sequence[object] | None,
) -> Header | None:
    _check_unique(keys)
    for tag in tags:
        if not (_rows_fit(tag, len(keys)) if tag.rows else len(tag.values) == len(keys)):
            raise BatchError(f"Tag {tag.name!r} needs one value per row: {len(keys)} keys, {len(tag.values)} values.")
    if expect is not None and len(expect) != len(keys):
        raise BatchError(f"A put needs one expectation per key: {len(keys)} keys, {len(expect)} expectations.")
    if block is None:
        return None
    try:
        spec = unpack_header(header)
    except UNREADABLE as error:
        raise WireError(f"The header of a block can't be read: {error}.") from error
    names = [column.name for column in spec.columns]
    if spec.rows != len(keys) or spec.payload > block.nbytes or len(set(names)) != len(names) or not names or not keys:
        raise WireError(
            f"Header of {spec.rows} rows, {len(names)} columns, {spec.payload} bytes does not fit {len(keys)} keys and a block of "
            f"{block.nbytes} bytes."
        )
    return spec
