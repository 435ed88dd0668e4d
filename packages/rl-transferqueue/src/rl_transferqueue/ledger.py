"""What the controller knows: rows, tags, where columns lie, who waits for what. Pure: no clock, no socket, never a tensor.

Every operation checks all of its arguments before it changes anything. What others must do afterwards (blocks to give back to the units,
blocks to compact) is collected and taken by the caller.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from rl_protocol.errors import UNREADABLE, BatchError, DuplicateKeyError, MissingDataError, WireError
from rl_protocol.meta import Scalar
from rl_protocol.wire import Header
from rl_transferqueue.blocks import Block, BlockTable
from rl_transferqueue.messages import BlockRef, Compact, Compacted, Located, Rows
from rl_transferqueue.table import Ints, PartitionTable

_header_decoder = msgspec.msgpack.Decoder(Header)
_REMEMBERED = 1024
"""Last put ids per session that a repeated commit is compared with."""


@dataclass(eq=False, kw_only=True, slots=True)
class Waiter:
    """Someone who waits for rows. `token` is the caller's own; `ready` holds the uids that fulfil the wish now."""

    partition: str
    count: int
    fields: tuple[str, ...]
    where: Mapping[str, Scalar]
    task: str | None
    token: object
    ready: set[int] = field(default_factory=set[int])


class Ledger:
    """State of a plane.

    >>> ledger = Ledger()
    >>> ledger.commit(b"s", 1, "train", ("a", "b"), ({"n": 1}, {"n": 2}))
    []
    >>> ledger.list_rows("train", {"n": 2}).keys
    ('b',)
    """

    def __init__(self) -> None:
        self._partitions: dict[str, PartitionTable] = {}
        self._waiters: dict[str, list[Waiter]] = {}
        self._puts: dict[bytes, dict[int, None]] = {}
        self._next_uid = 1
        self.blocks = BlockTable()

    def row_counts(self) -> dict[str, int]:
        """partition -> number of rows."""
        return {name: len(table) for name, table in self._partitions.items()}

    # -- writing
    def commit(
        self,
        session: bytes,
        put_id: int,
        partition: str,
        keys: tuple[str, ...],
        tags: Sequence[Mapping[str, Scalar]] | None = None,
        block: BlockRef | None = None,
        header: bytes = b"",
    ) -> list[tuple[Waiter, Rows]]:
        """Add rows, tags and the columns of a block; returns the waiters that are served by it.

        Raises:
            DuplicateKeyError, BatchError, WireError: nothing was changed, the block was not taken.
        """
        done = self._puts.setdefault(session, {})
        if put_id in done:
            return []
        spec = _check_commit(keys, tags, block, header)
        if block is not None and block.id in self.blocks.blocks:
            raise WireError(f"Block {block.id} is committed already.")
        done[put_id] = None
        if len(done) > _REMEMBERED:
            del done[next(iter(done))]
        if not keys:
            return []
        table = self._partitions.setdefault(partition, PartitionTable())
        slots = table.add(keys, self._next_uid)
        self._next_uid += len(keys)
        if tags is not None:
            table.merge_tags(slots, tags)
        if block is not None and spec is not None:
            self._take(block, header, partition, len(keys) * len(spec.columns))
            self.blocks.drop_cells([table.place(column.name, slots, block.id) for column in spec.columns])
        return self._serve(partition, table, slots)

    def clear(self, partition: str, keys: Sequence[str] | None) -> int:
        """Remove rows; returns how many there were."""
        table = self._partitions.get(partition)
        if table is None:
            return 0
        slots = table.slots() if keys is None else np.unique(table.find(keys)[0])
        for waiter in self._waiters.get(partition, ()):
            waiter.ready.difference_update(table.uids(slots).tolist())
        self.blocks.drop_cells(table.remove(slots))
        if not len(table):
            del self._partitions[partition]
        return int(slots.size)

    def end_session(self, session: bytes) -> None:
        """Forget what was only kept for a session, its leases excepted."""
        self._puts.pop(session, None)

    # -- reading
    def locate(
        self, session: bytes, lease: int, partition: str, keys: tuple[str, ...], fields: tuple[str, ...]
    ) -> Located:
        """Where the columns are; the blocks are held by the lease.

        Raises:
            MissingDataError: rows or columns that are not there.
            WireError: the lease exists already.
        """
        if self.blocks.has_lease(session, lease):
            raise WireError(f"Lease {lease} of this session exists already.")
        table = self._partitions.get(partition) or PartitionTable()
        slots, missing = table.find(keys)
        if missing:
            raise MissingDataError(
                f"{len(missing)} rows are not in partition {partition!r}, the first is {missing[0]!r}."
            )
        cells = [_cells(table, partition, slots, keys, name) for name in fields]
        ids = np.unique(np.concatenate([block for block, _ in cells])) if cells else np.zeros(0, np.int64)
        places: dict[tuple[bytes, bytes], int] = {}
        place_of: list[int] = []
        for block, row in cells:
            place = (np.searchsorted(ids, block).astype("<i4").tobytes(), row.astype("<i4").tobytes())
            place_of.append(places.setdefault(place, len(places)))
        blocks = [self.blocks.blocks[block_id] for block_id in ids.tolist()]
        headers: dict[bytes, int] = {}
        header_of = tuple(headers.setdefault(block.header, len(headers)) for block in blocks)
        if blocks:
            self.blocks.lease(session, lease, ids.tolist())
        return Located(tuple(b.ref for b in blocks), tuple(headers), header_of, tuple(places), tuple(place_of))

    def list_rows(self, partition: str, where: Mapping[str, Scalar]) -> Rows:
        """All rows with the tags of `where`, oldest first."""
        table = self._partitions.get(partition) or PartitionTable()
        slots = table.slots()
        return _describe(table, slots[table.ready(slots, (), where, None)] if where else slots)

    # -- waiting
    def wait(self, waiter: Waiter) -> Rows | None:
        """The rows if they are there; else the waiter is kept and served by a later `commit` or `give_back`."""
        table = self._partitions.get(waiter.partition) or PartitionTable()
        slots = table.slots()
        slots = slots[table.ready(slots, waiter.fields, waiter.where, waiter.task)]
        if slots.size >= waiter.count:
            return self._hand_out(waiter, table, slots[: waiter.count])
        waiter.ready = set(table.uids(slots).tolist())
        self._waiters.setdefault(waiter.partition, []).append(waiter)
        return None

    def forget(self, waiter: Waiter) -> None:
        """The waiter has left; no error if it was served."""
        others = self._waiters.get(waiter.partition, [])
        if waiter in others:
            others.remove(waiter)
        if not others:
            self._waiters.pop(waiter.partition, None)

    def give_back(self, partition: str, task: str, uids: Ints) -> list[tuple[Waiter, Rows]]:
        """Rows that were handed out to someone who had left; those that still exist can be handed out again."""
        table = self._partitions.get(partition)
        if table is None:
            return []
        slots = table.find_uids(uids)
        table.consume(slots, task, False)
        return self._serve(partition, table, slots)

    # -- compaction
    def plan_compaction(self, block: Block) -> Compact:
        """What to copy out of a sparse block."""
        used: dict[str, Ints] = {}
        table = self._partitions.get(block.partition) or PartitionTable()
        for column in _header_decoder.decode(block.header).columns:
            cells = table.columns.get(column.name)
            rows = cells.row[cells.block == block.ref.id] if cells is not None else np.zeros(0, np.int64)
            if rows.size:
                used[column.name] = rows
        rows = np.unique(np.concatenate(list(used.values()))) if used else np.zeros(0, np.int64)
        return Compact(block.ref.id, block.header, rows.astype("<i8").tobytes(), tuple(used))

    def end_compaction(self, block: Block, plan: Compact, made: Compacted) -> None:
        """What still lies in the old block moves to the copy, if there is one; else the block stays as it is."""
        if made.block is not None:
            rows = np.frombuffer(plan.rows, "<i8")
            self._take(made.block, made.header, block.partition, rows.size * len(plan.fields))
            moved = self._move(block, made.block.id, rows, plan.fields)
            copy = self.blocks.blocks[made.block.id]
            lost, copy.full_cells = copy.cells - moved, moved
            self.blocks.drop_cells([np.full(moved, block.ref.id), np.full(lost, copy.ref.id)])
        elif made.no_gain:
            block.full_cells = block.cells
        self.blocks.end_compaction(block, failed=made.block is None and not made.no_gain)

    def _move(self, block: Block, new: int, rows: Ints, fields: Sequence[str]) -> int:
        table = self._partitions.get(block.partition)
        moved = 0
        for name in fields if table is not None else ():
            cells = table.columns.get(name) if table is not None else None
            if cells is not None:
                slots = np.flatnonzero(cells.block == block.ref.id)
                cells.row[slots] = np.searchsorted(rows, cells.row[slots])
                cells.block[slots] = new
                moved += int(slots.size)
        return moved

    # -- inner
    def _take(self, block: BlockRef, header: bytes, partition: str, cells: int) -> None:
        self.blocks.add(Block(block, header, partition, cells, cells))

    def _serve(self, partition: str, table: PartitionTable, slots: Ints) -> list[tuple[Waiter, Rows]]:
        served: list[tuple[Waiter, Rows]] = []
        for waiter in list(self._waiters.get(partition, ())):
            ready = table.ready(slots, waiter.fields, waiter.where, waiter.task)
            waiter.ready.difference_update(table.uids(slots[~ready]).tolist())
            waiter.ready.update(table.uids(slots[ready]).tolist())
            if len(waiter.ready) >= waiter.count:
                self.forget(waiter)
                oldest = np.asarray(heapq.nsmallest(waiter.count, waiter.ready), dtype=np.int64)
                served.append((waiter, self._hand_out(waiter, table, table.find_uids(oldest))))
        return served

    def _hand_out(self, waiter: Waiter, table: PartitionTable, slots: Ints) -> Rows:
        if waiter.task is not None and slots.size:
            table.consume(slots, waiter.task, True)
            taken = table.uids(slots).tolist()
            for other in self._waiters.get(waiter.partition, ()):
                if other.task == waiter.task:
                    other.ready.difference_update(taken)
        return _describe(table, slots)


def _describe(table: PartitionTable, slots: Ints) -> Rows:
    uids = table.uids(slots).astype("<i8").tobytes()
    return Rows(table.keys(slots), table.tags(slots), table.fields(slots), uids)


def _cells(table: PartitionTable, partition: str, slots: Ints, keys: tuple[str, ...], name: str) -> tuple[Ints, Ints]:
    cells = table.columns.get(name)
    absent = np.flatnonzero(cells.block[slots] == 0) if cells is not None else np.arange(slots.size)
    if cells is None or absent.size:
        first = int(absent[0]) if absent.size else 0
        there = sorted(table.fields(slots[first : first + 1]))
        raise MissingDataError(
            f"Row {keys[first] if keys else ''!r} of partition {partition!r} has no column {name!r}; it has {there} "
            f"({absent.size} of {slots.size} rows lack it)."
        )
    return cells.block[slots], cells.row[slots]


def _check_commit(
    keys: tuple[str, ...], tags: Sequence[object] | None, block: BlockRef | None, header: bytes
) -> Header | None:
    if len(set(keys)) != len(keys):
        raise DuplicateKeyError("A key occurs more than once in one put; keys must be unique.")
    if tags is not None and len(tags) != len(keys):
        raise BatchError(f"A put needs one row per key: {len(keys)} keys, {len(tags)} tags.")
    if block is None:
        return None
    try:
        spec = _header_decoder.decode(header)
    except UNREADABLE as error:
        raise WireError(f"The header of block {block.id} can't be read: {error}.") from error
    names = [column.name for column in spec.columns]
    if spec.rows != len(keys) or spec.payload > block.nbytes or len(set(names)) != len(names) or not names or not keys:
        raise WireError(
            f"Header of {spec.rows} rows, {len(names)} columns, {spec.payload} bytes does not fit {len(keys)} keys and a block of "
            f"{block.nbytes} bytes."
        )
    return spec
