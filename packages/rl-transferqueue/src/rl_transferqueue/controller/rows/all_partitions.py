"""The partitions of a plane, and the version of the plane."""

from __future__ import annotations

from collections.abc import ItemsView

from rl_transferqueue.controller.rows.partition_rows import PartitionTable
from rl_transferqueue.wire.arrays import Ints

_EMPTIED = 4096
"""Partitions that became empty and are remembered for watchers, at most ..."""
_EMPTIED_CHARACTERS = 1 << 20
"""... and characters of their names, at most."""


class Partitions:
    """Tables by partition. A partition is there while it has rows.

    Args:
        version: the first one. Watchers that have seen an earlier one have seen another controller.
    """

    def __init__(self, version: int = 1) -> None:
        self._before = version - 1
        """The last version that the controller before can have had."""
        self.version = version
        """Grows with every change of a row."""
        self._tables: dict[str, PartitionTable] = {}
        self._emptied: dict[str, int] = {}
        """Version at which a partition that is not there became empty."""
        self._emptied_characters = 0

    def items(self) -> ItemsView[str, PartitionTable]:
        """Name and table of each."""
        return self._tables.items()

    def find(self, name: str) -> PartitionTable | None:
        """The table, or None: the partition is not there."""
        return self._tables.get(name)

    def get(self, name: str) -> PartitionTable:
        """The table; an empty one that is not kept if the partition is not there."""
        return self._tables.get(name) or PartitionTable()

    def get_or_add(self, name: str) -> PartitionTable:
        """The table; a new one if the partition is not there."""
        table = self._tables.get(name)
        if table is None:
            table = self._tables[name] = PartitionTable(self.version)
            self._forget_emptied(name)
        return table

    def touch(self, table: PartitionTable, slots: Ints) -> None:
        """The rows change, in a new version."""
        self.version += 1
        table.changes.touch(slots, self.version)

    def drop_if_empty(self, name: str) -> None:
        """The partition is not there any more if it has no rows."""
        if len(self._tables[name]):
            return
        del self._tables[name]
        self._emptied[name] = self.version
        self._emptied_characters += len(name)
        while len(self._emptied) > _EMPTIED or self._emptied_characters > _EMPTIED_CHARACTERS:
            self._forget_emptied(next(iter(self._emptied)))

    def emptied_after(self, name: str, version: int) -> bool:
        """Whether the partition, which is not there, is known to have become empty after
        `version`."""
        return version < self._emptied.get(name, self._before)

    def _forget_emptied(self, name: str) -> None:
        if self._emptied.pop(name, None) is not None:
            self._emptied_characters -= len(name)
