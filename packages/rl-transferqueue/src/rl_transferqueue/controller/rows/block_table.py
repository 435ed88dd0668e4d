"""The blocks of a plane: cells in use, leases, and which blocks can be freed or copied. Pure.

A block is released once no (row, column) lies in it and no lease holds it, so a reader's views
never change. A block of which at most half is in use is sparse and should be copied to a smaller
one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

import numpy as np

from rl_transferqueue.controller.rows.column_places import Places
from rl_transferqueue.memory.block_epochs import Epochs
from rl_transferqueue.wire.arrays import Ints
from rl_transferqueue.wire.spans import BlockRef, Span

COMPACT_FROM = 4096
"""Smallest block in bytes that is worth shrinking."""


def _counted(slots: Ints) -> Iterable[tuple[int, int]]:
    """Each slot and how often it occurs."""
    if slots.size == 1:
        return ((int(slots[0]), 1),)
    found, counts = np.unique(slots, return_counts=True)
    return zip(found.tolist(), counts.tolist(), strict=True)


@dataclass(slots=True)
class Block:
    """A committed block; it is released when it has no `cells`, no `holders` and is not
    `compacting`."""

    ref: BlockRef
    header: bytes
    partition: str
    cells: int
    """(row, column) pairs that lie in it now."""
    full_cells: int
    """(row, column) pairs that lay in it when it was made."""
    holders: dict[bytes, int] | None = None
    """session -> leases on the block."""
    compacting: bool = False
    digest: bytes = b""
    """The xxh3-128 of its payload; empty: it is not verified. A block with one is not compacted."""
    generations: Ints | range | None = None
    """Of the rows that lay in it when it was made; None: not recorded, see `Ledger.unloads`."""


@dataclass(slots=True)
class _Shared:
    """A header and the number of blocks that have it."""

    header: bytes
    blocks: int = 0


@dataclass(slots=True)
class BlockTable:
    """All blocks by slot, the leases on them by session, and the work that follows from changes."""

    epochs: Epochs
    last_id: int = 0
    """Id of the last block."""
    blocks: dict[int, Block] = field(default_factory=dict[int, Block])
    used: int = 0
    """Bytes of all blocks."""
    by_partition: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes of blocks with rows, by partition."""
    _last_slot: int = 0
    _free_slots: list[int] = field(default_factory=list[int])
    _headers: dict[bytes, _Shared] = field(default_factory=dict[bytes, _Shared])
    """Blocks with equal headers share one object."""
    _idle: OrderedDict[int, Block] = field(default_factory=OrderedDict[int, Block])
    """Blocks with rows that no lease holds, by slot; the one used longest ago first."""
    _rowless: dict[int, Block] = field(default_factory=dict[int, Block])
    """Blocks without rows that are not released yet, by slot."""
    _leases: dict[bytes, dict[int, tuple[int, ...]]] = field(default_factory=dict[bytes, dict[int, tuple[int, ...]]])
    _released: list[BlockRef] = field(default_factory=list[BlockRef])
    _revoked: dict[bytes, list[int]] = field(default_factory=dict[bytes, list[int]])
    _sparse: dict[int, None] = field(default_factory=dict[int, None])
    _stalled: dict[int, Block] = field(default_factory=dict[int, Block])
    """Blocks whose compaction found no memory, by slot; they stay `compacting`."""

    def add(self, span: Span, header: bytes, partition: str, cells: int) -> Block:
        """A new block that holds `cells` (row, column) pairs."""
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            self._last_slot += 1
            slot = self._last_slot
        self.last_id += 1
        shared = self._headers.get(header)
        if shared is None:
            shared = self._headers[header] = _Shared(header)
        shared.blocks += 1
        block = Block(BlockRef(self.last_id, span, slot), shared.header, partition, cells, cells)
        self.blocks[slot] = self._idle[slot] = block
        self.used += span.nbytes
        self.by_partition[partition] = self.by_partition.get(partition, 0) + span.nbytes
        return block

    def drop_cells(self, places: Places) -> None:
        """Cells have left the blocks they lay in."""
        for slots, columns in places:
            if not slots.size:
                continue
            for slot, count in _counted(slots):
                block = self.blocks[slot]
                block.cells -= count * columns
                self.epochs.advance(slot)
                self._settle(block)

    def lose(self, unit: int) -> Ints:
        """A storage unit has ended; returns the slots of its blocks, which are empty now."""
        gone = [block for block in self.blocks.values() if block.ref.span.unit == unit]
        for block in gone:
            block.cells, block.compacting = 0, False
            self.epochs.advance(block.ref.slot)
            self._settle(block)
        return np.array([block.ref.slot for block in gone], dtype=np.int64)

    # -- leases
    def lease(self, session: bytes, lease: int, slots: Iterable[int]) -> None:
        """Hold the blocks until the lease is released."""
        held = tuple(slots)
        self._leases.setdefault(session, {})[lease] = held
        for slot in held:
            block = self.blocks[slot]
            self._idle.pop(slot, None)
            if block.holders is None:
                block.holders = {}
            block.holders[session] = block.holders.get(session, 0) + 1

    def has_lease(self, session: bytes, lease: int) -> bool:
        return lease in self._leases.get(session, {})

    def has_leases(self, session: bytes) -> bool:
        return session in self._leases

    def release(self, session: bytes, leases: Iterable[int] | None = None) -> None:
        """End leases of a session (default: all); unknown ones are ignored."""
        mine = self._leases.get(session, {})
        for lease in list(mine) if leases is None else leases:
            for slot in mine.pop(lease, ()):
                block = self.blocks[slot]
                assert block.holders is not None
                block.holders[session] -= 1
                if not block.holders[session]:
                    del block.holders[session]
                if block.cells and not block.holders:
                    self._idle[slot] = block
                self._settle(block)
        if not mine:
            self._leases.pop(session, None)

    def leased(self) -> dict[bytes, list[Block]]:
        """session -> blocks with rows that its leases hold."""
        held = {session: {it for slots in leases.values() for it in slots} for session, leases in self._leases.items()}
        blocks = {session: [self.blocks[slot] for slot in sorted(slots)] for session, slots in held.items()}
        return {session: rows for session, its in blocks.items() if (rows := [it for it in its if it.cells])}

    def longest_idle(self, kept: Container[int], in_units: Callable[[int], bool]) -> Block | None:
        """The block, not in the slots `kept`, that was used longest ago, of those that would be
        released without their rows and lie in such a unit; None: there is none."""
        idle = (it for slot, it in self._idle.items() if slot not in kept and not it.compacting)
        return next((it for it in idle if in_units(it.ref.span.unit)), None)

    def read_only_by_leases(self) -> dict[bytes, int]:
        """session -> bytes of blocks without rows that it holds; counted for each session that
        holds one."""
        held: dict[bytes, int] = {}
        for block in self._rowless.values():
            for session in block.holders or ():
                held[session] = held.get(session, 0) + block.ref.span.nbytes
        return held

    # -- work to do
    @property
    def unsettled(self) -> bool:
        """Whether any of the `take_...` methods would return something."""
        return bool(self._released or self._revoked or self._sparse)

    def take_released(self) -> list[BlockRef]:
        """Blocks whose memory can be freed; each is returned once."""
        out, self._released = self._released, []
        return out

    def take_revoked(self) -> dict[bytes, list[int]]:
        """session -> ids of blocks that only leases keep; each is returned once."""
        out, self._revoked = self._revoked, {}
        return out

    def take_sparse(self) -> list[Block]:
        """Blocks to be compacted. Each is held until `end_compaction`."""
        chosen = [self.blocks[slot] for slot in self._sparse]
        self._sparse = {}
        for block in chosen:
            block.compacting = True
        return chosen

    def end_compaction(self, block: Block, *, failed: bool) -> None:
        """The compaction has ended; one that `failed` for lack of memory is repeated by
        `retry_compactions`."""
        if failed and block.cells:
            self._stalled[block.ref.slot] = block
        else:
            block.compacting = False
            self._settle(block)

    def retry_compactions(self) -> None:
        """Memory became free: repeat failed compactions."""
        stalled, self._stalled = self._stalled, {}
        for block in stalled.values():
            block.compacting = False
            self._settle(block)

    def _settle(self, block: Block) -> None:
        slot = block.ref.slot
        if block.cells:
            sparse = block.cells * 2 <= block.full_cells and block.ref.span.nbytes >= COMPACT_FROM
            if sparse and not block.compacting and not block.digest:
                self._sparse[slot] = None
            return
        self._sparse.pop(slot, None)
        if self.blocks.get(slot) is not block:
            return
        if self._stalled.pop(slot, None) is not None:  # nothing is left to copy
            block.compacting = False
        self._idle.pop(slot, None)
        if slot not in self._rowless:
            self._rowless[slot] = block
            self._left(block)
        if block.compacting:
            return
        if block.holders:
            for session in block.holders:
                self._revoked.setdefault(session, []).append(block.ref.id)
            return
        del self.blocks[slot], self._rowless[slot]
        shared = self._headers[block.header]
        shared.blocks -= 1
        if not shared.blocks:
            del self._headers[block.header]
        self._free_slots.append(slot)
        self._released.append(block.ref)
        self.used -= block.ref.span.nbytes

    def _left(self, block: Block) -> None:
        """Subtract a block whose last row is gone."""
        left = self.by_partition[block.partition] - block.ref.span.nbytes
        if left:
            self.by_partition[block.partition] = left
        else:
            del self.by_partition[block.partition]
