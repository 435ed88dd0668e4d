"""Where rows were found, kept for the next get of the same rows: a get that asks nobody."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np

from rl_transferqueue.board import BoardView
from rl_transferqueue.leases import Anchor
from rl_transferqueue.messages import Located
from rl_transferqueue.table import Ints

_ENTRIES = 64
"""Answers that are kept, at most ..."""
_ROWS = 1 << 18
"""... and rows of all of them together, at most, unless the last answer alone has more."""

Question: TypeAlias = tuple[str, tuple[str, ...], tuple[str, ...], tuple[int, ...]]
"""(partition, keys, columns, generations)."""


class Location:
    """An answer of the controller, and the lease that keeps its blocks."""

    def __init__(self, located: Located, anchor: Anchor) -> None:
        self.located = located
        self.anchor = anchor
        self.blocks = frozenset(ref.id for ref in located.blocks)
        self.slots: Ints = np.array([ref.slot for ref in located.blocks], dtype=np.int64)
        self.epochs: Ints = np.frombuffer(located.epochs, "<i8")


class Locations:
    """The last answers. One is right as long as the board shows the epochs it came with, and is forgotten when it is not.

    The lease of an answer keeps its blocks from being used again: the controller says (`forget_blocks`) when nothing else needs them.
    """

    def __init__(self, board: BoardView) -> None:
        self._board = board
        self._entries: OrderedDict[Question, Location] = OrderedDict()
        self._rows = 0

    def find(self, question: Question) -> Location | None:
        """The answer, if it is still right."""
        entry = self._entries.get(question)
        if entry is None:
            return None
        if not self._board.shows(entry.slots, entry.epochs):
            self._drop(question)
            return None
        self._entries.move_to_end(question)
        return entry

    def keep(self, question: Question, location: Location) -> None:
        """Remember an answer; the one that was not needed for the longest time goes."""
        self._drop(question)
        self._entries[question] = location
        self._rows += len(question[1])
        while len(self._entries) > 1 and (len(self._entries) > _ENTRIES or self._rows > _ROWS):
            self._drop(next(iter(self._entries)))

    def forget_blocks(self, blocks: Iterable[int]) -> None:
        """Forget answers that name one of the blocks."""
        gone = set(blocks)
        for question in [q for q, e in self._entries.items() if e.blocks & gone]:
            self._drop(question)

    def forget_partition(self, partition: str) -> None:
        """Forget answers about a partition."""
        for question in [q for q in self._entries if q[0] == partition]:
            self._drop(question)

    def clear(self) -> None:
        """Forget all."""
        self._entries.clear()
        self._rows = 0

    def _drop(self, question: Question) -> None:
        if self._entries.pop(question, None) is not None:
            self._rows -= len(question[1])
