"""When the rows of one partition changed, and which of them were cleared."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence

import numpy as np

from rl_transferqueue.controller.rows.slot_arrays import Resize
from rl_transferqueue.wire.arrays import Bools, Ints

_REMOVED = 4096
"""Cleared rows that are remembered for watchers, at least, unless ..."""
_REMOVED_CHARACTERS = 128
"""... their keys are longer than this on average."""


class ChangeLog:
    """Versions of changes by slot.

    Args:
        slots: how many slots there are.
        version: of the plane when the partition was made; earlier changes are not known here.
    """

    def __init__(self, slots: int, version: int) -> None:
        self.version = version
        """Version of the last change."""
        self._changed: Ints = np.zeros(slots, np.int64)
        self._removed: deque[tuple[int, str]] = deque()
        self._removed_characters = 0
        self._forgotten = version
        """Rows that were cleared up to this version are not in `_removed` any more."""

    def touch(self, slots: Ints, version: int) -> None:
        """The rows changed."""
        self._changed[slots] = version
        self.version = version

    def add_removed(self, keys: Sequence[str], rows_left: int) -> None:
        """Rows were cleared in the version of the last `touch`; the oldest of many are
        forgotten."""
        most = max(_REMOVED, 2 * rows_left)
        if len(keys) > most:
            self._removed.clear()
            self._removed_characters, self._forgotten = 0, self.version
            keys = keys[-most:]
        version = self.version
        self._removed.extend([(version, key) for key in keys])
        self._removed_characters += sum(map(len, keys))
        while len(self._removed) > most or self._removed_characters > _REMOVED_CHARACTERS * most:
            self._forgotten, key = self._removed.popleft()
            self._removed_characters -= len(key)

    def knows(self, since: int) -> bool:
        """Whether all rows that were cleared after that version are remembered."""
        return since >= self._forgotten

    def changed(self, since: int, alive: Bools) -> Ints:
        """Live slots that changed after that version, least recent change first."""
        slots = np.flatnonzero((self._changed[: alive.size] > since) & alive)
        return slots[np.argsort(self._changed[slots], kind="stable")]

    def unchanged(self, slots: Ints, since: int) -> Bools:
        """Which of the rows have not changed after that version."""
        return self._changed[slots] <= since

    def removed(self, since: int, present: Container[str]) -> list[str]:
        """Keys that were cleared after that version and are not `present` now."""
        gone: dict[str, None] = {}
        for version, key in reversed(self._removed):
            if version <= since:
                break
            if key not in present:
                gone[key] = None
        return list(gone)

    def resize(self, change: Resize) -> None:
        """Bring the array to its new form."""
        self._changed = change(self._changed)
