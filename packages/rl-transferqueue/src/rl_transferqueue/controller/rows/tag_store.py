"""The tags of the rows of one partition, by slot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rl_protocol.batch.kv_batch_meta import Scalar
from rl_transferqueue.controller.rows.slot_arrays import ABSENT, Resize
from rl_transferqueue.wire.arrays import Bools, Ints, span_of
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
        self._given: dict[str, Bools] = {}
        """By name: which rows have the tag, because comparing every value with `ABSENT` is slow."""

    def of(self, slots: Ints) -> tuple[TagColumn, ...]:
        """All tags of the rows."""
        where = span_of(slots)
        at = slots if where is None else where
        out: list[TagColumn] = []
        for name, column in self.values.items():
            given = self._given[name][at]
            if given.all():
                out.append(TagColumn(name, tuple(column[at].tolist())))
            elif given.any():
                rows = np.flatnonzero(given)
                out.append(TagColumn(name, tuple(column[at][rows].tolist()), rows.astype("<i4").tobytes()))
        return tuple(out)

    def of_row(self, slot: int) -> dict[str, Scalar]:
        """The tags of one row."""
        return {name: column[slot] for name, column in self.values.items() if column[slot] is not ABSENT}

    def merge(self, slots: Ints, tags: Iterable[TagColumn]) -> None:
        """Set tags of the rows; rows in `tags` count within `slots`."""
        for tag in tags:
            if tag.name not in self.values:
                self.values[tag.name] = np.full(self._slots, ABSENT, object)
                self._given[tag.name] = np.zeros(self._slots, np.bool_)
            if slots.size == 1 == len(tag.values):
                (value,) = tag.values
                self.values[tag.name][slots[0]] = self._pooled(value) if type(value) is str else value
                self._given[tag.name][slots[0]] = True
                continue
            at = slots[np.frombuffer(tag.rows, "<i4")] if tag.rows else slots
            self.values[tag.name][at] = [self._pooled(value) if type(value) is str else value for value in tag.values]
            self._given[tag.name][at] = True

    def clear(self, slots: Ints) -> None:
        """Remove all tags of the rows."""
        for name, values in self.values.items():
            values[slots] = ABSENT
            self._given[name][slots] = False

    def resize(self, slots: int, change: Resize) -> None:
        """There are `slots` slots from now on; `change` brings each array to its new form."""
        self._slots = slots
        self.values = {name: change(array) for name, array in self.values.items()}
        self._given = {name: change(array) for name, array in self._given.items()}

    def _pooled(self, text: str) -> str:
        if len(text) > _POOLED_CHARACTERS:
            return text
        if len(self._pool) >= _POOLED:
            self._pool = {}
        return self._pool.setdefault(text, text)
