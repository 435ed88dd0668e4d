"""The tags of the rows of one partition, by slot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rl_protocol.batch.kv_batch_meta import Scalar
from rl_transferqueue.controller.rows.slot_arrays import ABSENT, Resize
from rl_transferqueue.wire.arrays import Ints
from rl_transferqueue.wire.messages import TagColumn

Values: TypeAlias = npt.NDArray[Any]

_POOLED = 4096
"""Texts that are kept once, at most ..."""
_POOLED_CHARACTERS = 64
"""... and characters of each, at most."""


class TagStore:
    """One array of values per tag; equal short texts are kept once.

    Args:
        slots: how many slots there are.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._pool: dict[str, str] = {}
        self.values: dict[str, Values] = {}
        """By name; rows without the tag hold `ABSENT`."""

    def of(self, slots: Ints) -> tuple[TagColumn, ...]:
        """All tags of the rows."""
        out: list[TagColumn] = []
        for name, column in self.values.items():
            values = column[slots].tolist()
            if ABSENT not in values:
                out.append(TagColumn(name, tuple(values)))
                continue
            rows = [i for i, value in enumerate(values) if value is not ABSENT]
            if rows:
                out.append(TagColumn(name, tuple(values[i] for i in rows), np.array(rows, "<i4").tobytes()))
        return tuple(out)

    def of_row(self, slot: int) -> dict[str, Scalar]:
        """The tags of one row."""
        return {name: column[slot] for name, column in self.values.items() if column[slot] is not ABSENT}

    def merge(self, slots: Ints, tags: Iterable[TagColumn]) -> None:
        """Set tags of the rows; rows in `tags` count within `slots`."""
        for tag in tags:
            if tag.name not in self.values:
                self.values[tag.name] = np.full(self._slots, ABSENT, object)
            at = slots[np.frombuffer(tag.rows, "<i4")] if tag.rows else slots
            self.values[tag.name][at] = [self._pooled(value) if type(value) is str else value for value in tag.values]

    def clear(self, slots: Ints) -> None:
        """Remove all tags of the rows."""
        for values in self.values.values():
            values[slots] = ABSENT

    def resize(self, slots: int, change: Resize) -> None:
        """There are `slots` slots from now on; `change` brings each array to its new form."""
        self._slots = slots
        self.values = {name: change(array) for name, array in self.values.items()}

    def _pooled(self, text: str) -> str:
        if len(text) > _POOLED_CHARACTERS:
            return text
        if len(self._pool) >= _POOLED:
            self._pool = {}
        return self._pool.setdefault(text, text)
