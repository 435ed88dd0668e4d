"""What the controller knows of rows and blocks. Pure: no clock, no socket, never a tensor.

Every operation checks all of its arguments before it changes anything. What must follow a change
(memory to free, blocks to copy, leases to revoke) is collected in `blocks` until it is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from rl_protocol.batch.kv_batch_meta import Scalar
from rl_protocol.errors import ConflictError, WireError
from rl_transferqueue.controller.rows.all_partitions import Partitions
from rl_transferqueue.controller.rows.block_table import Block, BlockTable
from rl_transferqueue.controller.rows.column_places import ON_DISK
from rl_transferqueue.controller.rows.commit_checks import check_commit, check_expected, check_unique
from rl_transferqueue.controller.rows.lookup import bytes_by_unit, cells_of, existing_slots, places_of
from rl_transferqueue.controller.rows.partition_rows import describe_rows
from rl_transferqueue.controller.rows.waiters import Served, Waiters
from rl_transferqueue.journal.records import FoundPut, PutRecord
from rl_transferqueue.memory.block_epochs import Epochs
from rl_transferqueue.wire.arrays import Ints
from rl_transferqueue.wire.header_cache import unpack_header
from rl_transferqueue.wire.messages import Flags, Located, Measure, Rows, TagColumn
from rl_transferqueue.wire.spans import Span
from rl_transferqueue.wire.tags import to_columns, to_rows

_PRIVATE_SLOTS = 1 << 16
_INCARNATION_BITS = 40
"""Versions and block ids of a controller are larger than those of the controllers before."""
_tags = msgspec.msgpack.Decoder(tuple[TagColumn, ...])


class Contents(NamedTuple):
    """A summary of all partitions, by name."""

    rows: dict[str, int]
    """Number of rows."""
    lost: dict[str, tuple[str, ...]]
    """Rows that lost columns with a storage unit."""
    columns: dict[str, tuple[str, ...]]
    """Columns that some row has or had."""
    tasks: dict[str, tuple[str, ...]]
    """Tasks that consumed rows."""


class Ledger:
    """Rows, the blocks that hold their columns, and the callers that wait for them.

    Attributes:
        unloads: blocks record which rows they hold, as `unload_block` needs it.

    >>> ledger = Ledger()
    >>> ledger.commit("train", ("a", "b"), (TagColumn("n", (1, 2)),))
    (range(1, 3), [])
    >>> ledger.list_rows("train", {"n": 2}).keys
    ('b',)
    """

    def __init__(self, epochs: Epochs | None = None, incarnation: int = 1) -> None:
        before = (incarnation - 1) << _INCARNATION_BITS
        self._partitions = Partitions(before + 1)
        self._next_generation = 1
        self.waiters = Waiters(self._partitions)
        self.blocks = BlockTable(epochs or Epochs(_PRIVATE_SLOTS), last_id=before)
        self.unloads = False

    def contents(self) -> Contents:
        """What is there, for statistics."""
        tables = self._partitions.items()
        return Contents(
            {name: len(table) for name, table in tables},
            {name: tuple(table.columns.lost) for name, table in tables if table.columns.lost},
            {name: tuple(table.columns.cells) for name, table in tables},
            {name: tuple(sorted(table.consumption.tasks)) for name, table in tables},
        )

    # -- writing
    def commit(
        self,
        partition: str,
        keys: tuple[str, ...],
        tags: Sequence[TagColumn] = (),
        block: Span | None = None,
        header: bytes = b"",
        expect: Sequence[Mapping[str, Scalar] | None] | None = None,
    ) -> tuple[Ints | range, Served]:
        """Add rows, tags and the columns of a block.

        Returns:
            Generations of the rows, as a range where all rows are new, and callers that are served
                by the change.

        Raises:
            DuplicateKeyError, BatchError, ConflictError, WireError: nothing was changed, the block
                was not taken.
        """
        first = self.prepare(partition, keys, tags, block, header, expect)
        return self.apply(partition, keys, tags, block, header, first)

    def prepare(
        self,
        partition: str,
        keys: tuple[str, ...],
        tags: Sequence[TagColumn],
        block: Span | None,
        header: bytes,
        expect: Sequence[Mapping[str, Scalar] | None] | None,
    ) -> int:
        """Check a commit, and reserve generations for its new rows.

        Returns:
            The first generation, for `apply`. In between no other call may add or clear these rows.

        Raises:
            DuplicateKeyError, BatchError, ConflictError, WireError: nothing was changed.
        """
        check_commit(keys, tags, block, header, expect)
        table = self._partitions.get(partition)
        if expect is not None:
            check_expected(table, partition, keys, expect)
        first = self._next_generation
        self._next_generation += len(keys)
        return first

    def apply(
        self,
        partition: str,
        keys: tuple[str, ...],
        tags: Sequence[TagColumn],
        block: Span | None,
        header: bytes,
        first: int,
        digest: bytes = b"",
    ) -> tuple[Ints | range, Served]:
        """Make a commit that was prepared; see `commit`.

        Args:
            digest: of the block's payload; see `Block`.
        """
        if not keys:
            return np.zeros(0, np.int64), []
        spec = unpack_header(header) if block is not None else None
        table = self._partitions.get_or_add(partition)
        slots, new = table.add(keys, first)
        before = self.waiters.count_ready(partition, table, slots, new)
        generations, last = table.generations(slots), first + len(keys) - 1
        rows = range(first, last + 1) if generations[-1] == last else generations  # the last one: all rows are new
        table.tags.merge(slots, tags)
        if block is not None and spec is not None:
            names = [column.name for column in spec.columns]
            made = self.blocks.add(block, header, partition, len(keys) * len(names))
            made.digest = digest
            if self.unloads:
                made.generations = rows
            self.blocks.drop_cells(table.columns.place(names, slots, made.ref.slot))
            table.columns.recover(keys, names)
        self._partitions.touch(table, slots)
        return rows, self.waiters.serve(partition, table, slots, before)

    def generations(self, partition: str, keys: Sequence[str] | None, first: int = 0) -> Ints:
        """Generations of these rows (None: all); rows that are not there are left out, or get those
        from `first` on, as `apply` will give them.
        """
        table = self._partitions.get(partition)
        if first and keys is not None:
            return table.next_generations(keys, first)
        return table.generations(table.slots() if keys is None else table.find(keys)[0])

    def restore_rows(self, partition: str, keys: Mapping[int, str]) -> None:
        """Add rows of an earlier plane to a new partition: their keys by generation, ascending."""
        if keys:
            self._partitions.get_or_add(partition).restore(tuple(keys.values()), np.array(list(keys), np.int64))

    def restore(self, put: PutRecord, rows: Ints) -> None:
        """Add tags and columns of a put of an earlier plane to rows that are there. The columns are
        on the disk alone. Puts are restored in the order in which they were made.

        Args:
            rows: which rows of the put, ascending; not empty.
        """
        keys = [put.keys[row] for row in rows.tolist()]
        self._next_generation = max(self._next_generation, max(put.generations) + 1)
        table = self._partitions.get_or_add(put.partition)
        slots = table.find(keys)[0]
        tags = to_rows(_tags.decode(put.tags), len(put.keys))
        table.tags.merge(slots, to_columns(keys, [tags[row] for row in rows.tolist()]))
        if put.header:
            table.columns.place(_names(put.header), slots, ON_DISK)
        self._partitions.touch(table, slots)

    def skip_generations(self, last: int) -> None:
        """Give no new row a generation up to this one."""
        self._next_generation = max(self._next_generation, last + 1)

    def restore_consumption(self, partition: str, task: str, generations: Ints) -> None:
        """Mark those of the rows that are there as consumed by the task; no caller waits yet."""
        table = self._partitions.find(partition)
        if table is not None:
            table.consumption.mark(table.find_generations(generations), task, True)

    def unload(self, partition: str, keys: Sequence[str]) -> None:
        """The journal has these rows: their columns leave memory. Unknown rows are ignored."""
        table = self._partitions.find(partition)
        if table is not None:
            self.blocks.drop_cells(table.columns.unload(np.unique(table.find(keys)[0])))

    def blocks_of(self, partition: str, keys: Sequence[str], fields: Sequence[str]) -> list[Block]:
        """The blocks in memory with one of the fields of these rows. Unknown rows are ignored."""
        table = self._partitions.get(partition)
        return [self.blocks.blocks[slot] for slot in table.columns.blocks_of(table.find(keys)[0], fields)]

    def unload_block(self, block: Block) -> int:
        """The journal has all that lies in a block, which leaves memory; returns of how many
        rows. Looks at no others; needs `unloads`."""
        assert block.generations is not None
        table = self._partitions.get(block.partition)
        slots = table.find_generations(np.array(block.generations, np.int64))
        slots = table.columns.rows_in(block.ref.slot, slots)
        self.blocks.drop_cells(table.columns.unload(slots, block.ref.slot))
        return int(slots.size)

    def on_disk(self, partition: str, keys: Sequence[str], fields: Sequence[str]) -> Ints:
        """Generations of those of the rows that have one of the fields on the disk alone."""
        table = self._partitions.get(partition)
        slots = table.find(keys)[0]
        return table.generations(slots[table.columns.on_disk(slots, fields)])

    @property
    def version(self) -> int:
        """Grows with every change of a row."""
        return self._partitions.version

    def wants(self, found: FoundPut, since: int, generations: Ints, fields: Collection[str]) -> bool:
        """Whether the put has one of the fields of one of the rows, and the row has that field on
        the disk alone, in no later put, and has not changed after version `since`, in which the
        journal was read."""
        parts = self._unloaded(found, since, fields)
        return any(np.isin(found.put.generations, generations)[rows].any() for _, _, rows in parts)

    def load(self, found: FoundPut, block: Span, since: int, digest: bytes = b"") -> None:
        """The columns of a put that `wants` has named are in this block again, of all of its rows;
        `digest` is that of the block's payload, see `Block`."""
        put, table = found.put, self._partitions.get(found.put.partition)
        made = self.blocks.add(block, put.header, put.partition, 0)
        made.digest, made.generations = digest, np.array(put.generations, np.int64)
        for names, slots, rows in self._unloaded(found, since, _names(put.header)):
            made.cells += table.columns.load(names, slots, made.ref.slot, rows)
        made.full_cells = made.cells

    def unchanged(self, partition: str, generations: Ints, since: int) -> bool:
        """Whether none of these rows has changed after version `since`; cleared rows are
        ignored."""
        table = self._partitions.get(partition)
        return bool(table.changes.unchanged(table.find_generations(generations), since).all())

    def _unloaded(self, found: FoundPut, since: int, fields: Collection[str]) -> list[tuple[list[str], Ints, Ints]]:
        """Columns of the put that later puts have written together, slots of the rows that `wants`
        means, and which rows of the put these are."""
        put, table = found.put, self._partitions.get(found.put.partition)
        generations = np.array(put.generations, np.int64)
        slots = table.find_generations(generations)
        rows = np.flatnonzero(np.isin(generations, table.generations(slots)))
        same = table.changes.unchanged(slots, since)
        later = [(set(_names(it.header)), np.array(it.generations, np.int64)) for it in found.later]
        groups: dict[tuple[int, ...], list[str]] = {}
        for name in _names(put.header):
            if name in fields:
                which = tuple(i for i, (names, _) in enumerate(later) if name in names)
                groups.setdefault(which, []).append(name)
        parts: list[tuple[list[str], Ints, Ints]] = []
        for which, names in groups.items():
            newer = np.concatenate([np.zeros(0, np.int64), *(later[i][1] for i in which)])
            mine = same & table.columns.on_disk(slots, names) & ~np.isin(generations[rows], newer)
            parts.append((names, slots[mine], rows[mine]))
        return parts

    def clear(self, partition: str, keys: Sequence[str] | None) -> tuple[int, Served]:
        """Remove rows; returns how many there were, and watchers that are served by it."""
        table = self._partitions.find(partition)
        if table is None:
            return 0, []
        slots = table.slots() if keys is None else np.unique(table.find(keys)[0])
        if not slots.size:
            return 0, []
        before = self.waiters.count_ready(partition, table, slots)
        self._partitions.touch(table, slots)
        self.blocks.drop_cells(table.remove(slots))
        for waiter, count in before.items():
            waiter.ready -= count
        served = self.waiters.serve_watchers(partition)
        self._partitions.drop_if_empty(partition)
        return int(slots.size), served

    def lose_unit(self, unit: int) -> Served:
        """A storage unit has ended with all columns in it. If blocks can be unloaded, the journal
        has these, and no row has lost one."""
        for block in [it for it in self.blocks.blocks.values() if it.ref.span.unit == unit] if self.unloads else ():
            self.unload_block(block)
        blocks = self.blocks.lose(unit)
        served: Served = []
        for partition, table in self._partitions.items():
            slots = table.columns.lose(blocks, table.keys)
            if slots.size:
                self._partitions.touch(table, slots)
                self.waiters.recount(partition, table)
                served += self.waiters.serve_watchers(partition)
        return served

    # -- reading
    def locate(
        self,
        session: bytes,
        lease: int,
        partition: str,
        keys: tuple[str, ...],
        fields: tuple[str, ...],
        generations: Ints | None = None,
    ) -> Located:
        """Where the columns are; the blocks are held by the lease.

        Raises:
            MissingDataError, DataLostError: rows or columns that are not there.
            WireError: the lease exists already.
        """
        if self.blocks.has_lease(session, lease):
            raise WireError(f"Lease {lease} of this session exists already.")
        table = self._partitions.get(partition)
        slots = existing_slots(table, partition, keys, generations)
        used, places, place_of = places_of(cells_of(table, partition, slots, keys, fields), slots)
        blocks = [self.blocks.blocks[slot] for slot in used]
        headers: dict[bytes, int] = {}
        header_of = tuple(headers.setdefault(block.header, len(headers)) for block in blocks)
        if blocks:
            self.blocks.lease(session, lease, used)
        return Located(
            blocks=tuple(block.ref for block in blocks),
            epochs=self.blocks.epochs.of(np.array(used, dtype=np.int64)).astype("<i8").tobytes(),
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
        """The rows (oldest first) or those of `keys` (in that order) that have the tags `where` and
        all `fields` and are not consumed by `task`.

        Raises:
            MissingDataError: one of `keys` is not there.
        """
        table = self._partitions.get(partition)
        whole = not where and not fields and task is None
        if keys is None:
            return describe_rows(table, table.slots() if whole else table.find_ready(fields, where, task))
        slots = existing_slots(table, partition, keys, None)
        return describe_rows(table, slots if whole else slots[table.ready(slots, fields, where, task)])

    def bytes_by_unit(self, partition: str, keys: tuple[str, ...]) -> dict[int, Ints]:
        """Payload bytes [N] of the rows in each storage unit that has some.

        Columns that were put together are counted in equal parts per row.

        Raises:
            MissingDataError: a row is not there.
        """
        table = self._partitions.get(partition)
        return bytes_by_unit(table, existing_slots(table, partition, keys, None), self.blocks.blocks)

    def consumption(self, partition: str, task: str) -> Flags:
        """Which rows are consumed by the task."""
        table = self._partitions.get(partition)
        slots = table.slots()
        return Flags(table.keys(slots), table.consumption.consumed(slots, task).tobytes())

    def production(self, partition: str, fields: Sequence[str]) -> Flags:
        """Which rows have which columns."""
        table = self._partitions.get(partition)
        slots = table.slots()
        return Flags(table.keys(slots), table.columns.produced(slots, fields).tobytes())

    # -- consuming
    def claim(self, partition: str, keys: tuple[str, ...], task: str) -> Rows:
        """Mark the rows as consumed.

        Raises:
            MissingDataError, ConflictError, DuplicateKeyError: nothing was changed.
        """
        check_unique(keys)
        table = self._partitions.get(partition)
        slots = existing_slots(table, partition, keys, None)
        taken = np.flatnonzero(table.consumption.consumed(slots, task))
        if taken.size:
            raise ConflictError(
                f"Row {keys[int(taken[0])]!r} of partition {partition!r} is consumed by task {task!r} already ({taken.size} of "
                f"{len(keys)} rows are); list what is left and choose again."
            )
        self.waiters.consume(partition, table, slots, task)
        return describe_rows(table, slots)

    def give_back(self, partition: str, task: str, generations: Ints) -> Served:
        """Mark rows of a caller that has left as not consumed; rows that were cleared are
        ignored."""
        table = self._partitions.find(partition)
        if table is None:
            return []
        return self.waiters.unconsume(partition, table, table.find_generations(generations), [task])[1]

    def reset_consumption(self, partition: str, task: str | None, keys: Sequence[str] | None) -> tuple[Ints, Served]:
        """Mark rows as not consumed; returns generations of those that were, and callers that are
        served."""
        table = self._partitions.find(partition)
        if table is None:
            return np.zeros(0, np.int64), []
        slots = table.slots() if keys is None else np.unique(table.find(keys)[0])
        tasks = table.consumption.tasks if task is None else [task]
        consumed, served = self.waiters.unconsume(partition, table, slots, tasks)
        return table.generations(consumed), served

    # -- compaction
    def plan_compaction(self, block: Block) -> Measure:
        """What to copy out of a sparse block."""
        used: dict[str, Ints] = {}
        table = self._partitions.get(block.partition)
        for column in unpack_header(block.header).columns:
            cells = table.columns.cells.get(column.name)
            rows = cells.row[cells.block == block.ref.slot] if cells is not None else np.zeros(0, np.int32)
            if rows.size:
                used[column.name] = rows.astype(np.int64)
        rows = np.unique(np.concatenate(list(used.values()))) if used else np.zeros(0, np.int64)
        return Measure(block.ref.span, block.header, rows.astype("<i8").tobytes(), tuple(used))

    def end_compaction(
        self, block: Block, plan: Measure, copy: tuple[Span, bytes] | None, *, no_gain: bool = False
    ) -> None:
        """Move cells that are still in the block to the copy (its span and header), if there is
        one."""
        if copy is not None:
            rows = np.frombuffer(plan.rows, "<i8")
            made = self.blocks.add(*copy, block.partition, rows.size * len(plan.fields))
            made.generations = block.generations
            table = self._partitions.find(block.partition)
            moved = table.columns.move(block.ref.slot, rows, made.ref.slot) if table is not None else 0
            lost, made.full_cells = made.cells - moved, moved
            self.blocks.drop_cells([(np.full(moved, block.ref.slot), 1), (np.full(lost, made.ref.slot), 1)])
        elif no_gain:
            block.full_cells = block.cells
        self.blocks.end_compaction(block, failed=copy is None and not no_gain)


def _names(header: bytes) -> list[str]:
    return [column.name for column in unpack_header(header).columns] if header else []
