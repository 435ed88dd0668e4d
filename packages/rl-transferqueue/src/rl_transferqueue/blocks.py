"""The blocks a plane holds: how many cells of each are in use, who still reads them, and which may go. Pure.

A block is released once no (row, column) lies in it and no lease holds it: a reader's views never change under it. A block of which at most
half is in use is sparse: it should be copied to a smaller one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from rl_transferqueue.messages import BlockRef
from rl_transferqueue.table import Ints

COMPACT_FROM = 4096
"""Bytes from which on it is worth to copy a block in order to shrink it."""


@dataclass(slots=True)
class Block:
    """A committed block; it is released when `cells` and `leases` are both 0."""

    ref: BlockRef
    header: bytes
    partition: str
    cells: int
    """(row, column) pairs that lie in it now."""
    full_cells: int
    """(row, column) pairs that lay in it when it was made."""
    leases: int = 0
    compacting: bool = False


@dataclass(slots=True)
class BlockTable:
    """All blocks by id, the leases on them by session, and what is to be done with them."""

    blocks: dict[int, Block] = field(default_factory=dict[int, Block])
    _leases: dict[bytes, dict[int, tuple[int, ...]]] = field(default_factory=dict[bytes, dict[int, tuple[int, ...]]])
    _released: list[BlockRef] = field(default_factory=list[BlockRef])
    _sparse: dict[int, None] = field(default_factory=dict[int, None])
    _stalled: list[Block] = field(default_factory=list[Block])

    def add(self, block: Block) -> None:
        self.blocks[block.ref.id] = block

    def drop_cells(self, parts: Iterable[Ints]) -> None:
        """One cell less for every occurrence of a block id."""
        for part in parts:
            ids, counts = np.unique(part, return_counts=True)
            for block_id, count in zip(ids.tolist(), counts.tolist(), strict=True):
                block = self.blocks[block_id]
                block.cells -= count
                self._settle(block)

    # -- leases
    def lease(self, session: bytes, lease: int, blocks: Iterable[int]) -> None:
        """Hold the blocks until the lease is released."""
        held = tuple(blocks)
        self._leases.setdefault(session, {})[lease] = held
        for block_id in held:
            self.blocks[block_id].leases += 1

    def has_lease(self, session: bytes, lease: int) -> bool:
        return lease in self._leases.get(session, {})

    def has_leases(self, session: bytes) -> bool:
        return session in self._leases

    def release(self, session: bytes, leases: Iterable[int] | None = None) -> None:
        """End leases of a session (default: all); those that are not there are no error."""
        mine = self._leases.get(session, {})
        for lease in list(mine) if leases is None else leases:
            for block_id in mine.pop(lease, ()):
                block = self.blocks[block_id]
                block.leases -= 1
                self._settle(block)
        if not mine:
            self._leases.pop(session, None)

    # -- what is to be done
    def take_released(self) -> list[BlockRef]:
        """Blocks that may be used for something else, each said once."""
        out, self._released = self._released, []
        return out

    def take_sparse(self) -> list[Block]:
        """Blocks to be compacted. Each is held until `end_compaction`."""
        chosen = [self.blocks[block_id] for block_id in self._sparse]
        self._sparse = {}
        for block in chosen:
            block.compacting = True
            block.leases += 1
        return chosen

    def end_compaction(self, block: Block, *, failed: bool) -> None:
        """The compaction is over; one that failed for want of room is tried again after `retry_compactions`."""
        block.leases -= 1
        if failed:
            self._stalled.append(block)
        else:
            block.compacting = False
        self._settle(block)

    def retry_compactions(self) -> None:
        """Room was made."""
        stalled, self._stalled = self._stalled, []
        for block in stalled:
            block.compacting = False
            if block.cells:
                self._settle(block)

    def _settle(self, block: Block) -> None:
        if block.cells == 0:
            self._sparse.pop(block.ref.id, None)
            if block.leases == 0:
                del self.blocks[block.ref.id]
                self._released.append(block.ref)
        elif block.cells * 2 <= block.full_cells and block.ref.nbytes >= COMPACT_FROM and not block.compacting:
            self._sparse[block.ref.id] = None
