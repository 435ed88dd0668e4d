"""Cache where rows are, so that a repeated get sends no message."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from rl_transferqueue.memory.anchors import Anchor
from rl_transferqueue.memory.block_epochs import EpochView
from rl_transferqueue.memory.build_batch import Groups, pieces_of
from rl_transferqueue.wire.arrays import Ints
from rl_transferqueue.wire.messages import Located

_ENTRIES = 64
"""Most answers that are kept."""
_ROWS = 1 << 18
"""Most rows of all answers together, unless the last answer alone has more."""

RowQuery: TypeAlias = tuple[str, tuple[str, ...], tuple[str, ...], Sequence[int]]
"""(partition, keys, columns, generations); a plain tuple, because every get makes one."""


class Location:
    """An answer of the controller, with the lease that keeps its blocks."""

    def __init__(self, located: Located, anchor: Anchor) -> None:
        self.located = located
        self.anchor = anchor
        self.blocks = frozenset(ref.id for ref in located.blocks)
        self.slots: Ints = np.array([ref.slot for ref in located.blocks], dtype=np.int64)
        self.epochs: Ints = np.frombuffer(located.epochs, "<i8")
        self.copied: list[tuple[bytes, bytes] | None] | None = None
        """What `CopiedColumns` has found out about its places; None: nothing yet."""
        self._groups: Groups | None = None

    def groups(self, fields: Sequence[str]) -> Groups:
        """What to read; `fields` are the columns of the query."""
        if self._groups is None:
            self._groups = pieces_of(self.located, fields)
        return self._groups


class LocationCache:
    """The last answers. An answer is valid while its blocks have the epochs that it came with.

    The lease of an answer keeps its blocks from being reused. The controller tells the client when
    nothing else needs them (`forget_blocks`).
    """

    def __init__(self, epochs: EpochView) -> None:
        self._epochs = epochs
        self._entries: OrderedDict[RowQuery, Location] = OrderedDict()
        self._rows = 0

    def find(self, query: RowQuery) -> Location | None:
        """The answer, if it is still valid."""
        entry = self._entries.get(query)
        if entry is None:
            return None
        if not self._epochs.unchanged(entry.slots, entry.epochs):
            self._drop(query)
            return None
        self._entries.move_to_end(query)
        return entry

    def keep(self, query: RowQuery, location: Location) -> None:
        """Add an answer, and evict the least recently used ones."""
        self._drop(query)
        self._entries[query] = location
        self._rows += len(query[1])
        while len(self._entries) > 1 and (len(self._entries) > _ENTRIES or self._rows > _ROWS):
            self._drop(next(iter(self._entries)))

    def forget_blocks(self, blocks: Iterable[int]) -> None:
        """Drop answers that name one of the blocks."""
        gone = set(blocks)
        for query in [q for q, e in self._entries.items() if e.blocks & gone]:
            self._drop(query)

    def forget_partition(self, partition: str) -> None:
        """Drop answers about a partition."""
        for query in [q for q in self._entries if q[0] == partition]:
            self._drop(query)

    def clear(self) -> None:
        """Drop all answers."""
        self._entries.clear()
        self._rows = 0

    def _drop(self, query: RowQuery) -> None:
        if self._entries.pop(query, None) is not None:
            self._rows -= len(query[1])
