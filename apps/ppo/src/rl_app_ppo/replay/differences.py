"""Differences between two batches, or between their results: names, places and both values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from rl_protocol import BatchData, Column, ObjectColumn
from rl_trainer.checkpoints.kept_batches import PROMPTS, ROWS, KeptBatch

COMPUTED = ("actor/", "critic/", "response_length/", "prompt_length/", "rollout_corr/", "training/")
"""How the names of metrics begin that do not depend on time."""
_MISSING = "none"


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Where two values differ first, and both."""

    step: int
    name: str
    """Of a field, of a metric, or of a model whose weights they are the digest of."""
    row: str = ""
    """Key of the trajectory or uid of the prompt; empty: it is no field."""
    position: tuple[int, ...] = ()
    """In the value of the row; empty: the whole."""
    run: str
    other: str

    def __str__(self) -> str:
        place = f" of row {self.row}" if self.row else ""
        position = f" at position {', '.join(map(str, self.position))}" if self.position else ""
        return f"step {self.step}: {self.name}{place}{position}: {self.run}, and {self.other}"


def metric_differences(step: int, run: Mapping[str, float], other: Mapping[str, float]) -> list[Difference]:
    """The computed metrics of a step that are not equal; those that one side lacks differ.

    >>> run, other = {"actor/loss": 0.5, "timing_s/step": 1.0}, {"actor/loss": 0.25}
    >>> print(*metric_differences(3, run, other))
    step 3: actor/loss: 0.5, and 0.25
    """
    names = sorted(name for name in {*run, *other} if name.startswith(COMPUTED))
    pairs = [(name, _text(run.get(name)), _text(other.get(name))) for name in names]
    return [Difference(step=step, name=name, run=one, other=two) for name, one, two in pairs if one != two]


def weight_differences(step: int, run: Mapping[str, str], other: Mapping[str, str]) -> list[Difference]:
    """The models, by role and rank, whose weights or optimizer states are not equal."""
    return [
        Difference(step=step, name=f"weights of {name}", run=_text(run.get(name)), other=_text(other.get(name)))
        for name in sorted({*run, *other})
        if run.get(name) != other.get(name)
    ]


def field_difference(
    run: KeptBatch, run_columns: Mapping[str, BatchData], other: KeptBatch, other_columns: Mapping[str, BatchData]
) -> Difference | None:
    """The first difference between the fields of two batches, those of the prompts first.

    The rows themselves come first of all, then field by field in the order of the run, row by row.
    """
    step = run.step
    for file, mine, theirs in ((PROMPTS, run.prompts, other.prompts), (ROWS, run.rows, other.rows)):
        if mine.keys != theirs.keys:
            return _key_difference(step, mine.keys, theirs.keys)
        one, two = (found.get(file, BatchData({})) for found in (run_columns, other_columns))
        for name in dict.fromkeys((*one.field_names, *two.field_names)):
            if name not in one or name not in two:
                return Difference(step=step, name=name, run=_kind(one, name), other=_kind(two, name))
            if found := _column_difference(step, name, mine.keys, one[name], two[name]):
                return found
    return None


def _key_difference(step: int, run: Sequence[str], other: Sequence[str]) -> Difference:
    place = next((i for i, (a, b) in enumerate(zip(run, other, strict=False)) if a != b), min(len(run), len(other)))
    one, two = (keys[place] if place < len(keys) else _MISSING for keys in (run, other))
    return Difference(step=step, name="key", position=(place,), run=one, other=two)


def _kind(data: BatchData, name: str) -> str:
    return data[name].kind if name in data else _MISSING


def _column_difference(step: int, name: str, keys: Sequence[str], run: Column, other: Column) -> Difference | None:
    if (run.kind, run.dtype) != (other.kind, other.dtype):
        one, two = (f"{column.kind} {column.dtype}" for column in (run, other))
        return Difference(step=step, name=name, run=one, other=two)
    for row, key in enumerate(keys):
        one, two = run.row(row), other.row(row)
        if isinstance(run, ObjectColumn):
            if one != two:
                return Difference(step=step, name=name, row=key, run=_text(one), other=_text(two))
        elif (found := first_position(one, two)) is not None:
            values = [_text(array[found].item() if _has(array, found) else None) for array in (one, two)]
            return Difference(step=step, name=name, row=key, position=found, run=values[0], other=values[1])
    return None


def first_position(run: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> tuple[int, ...] | None:
    """The first position at which the bits of two arrays differ, also that after the end of the
    shorter one; None: they are equal.

    >>> first_position(np.array([1.0, 2.0]), np.array([1.0, 2.5]))
    (1,)
    >>> first_position(np.zeros(2), np.zeros(3)), first_position(np.zeros(1), -np.zeros(1))
    ((2,), (0,))
    >>> first_position(np.array([np.nan]), np.array([np.nan]))
    """
    common = tuple(slice(0, min(a, b)) for a, b in zip(run.shape, other.shape, strict=True))
    one, two = (np.ascontiguousarray(array[common]) for array in (run, other))
    bits = np.dtype(f"u{one.dtype.itemsize}")
    differ = np.argwhere(np.atleast_1d(one.view(bits) != two.view(bits)))
    if len(differ):
        return tuple(int(i) for i in differ[0]) if run.ndim else ()
    if run.shape == other.shape:
        return None
    return tuple(min(a, b) if a != b else 0 for a, b in zip(run.shape, other.shape, strict=True))


def _has(array: np.ndarray[Any, Any], position: Sequence[int]) -> bool:
    return all(i < size for i, size in zip(position, array.shape, strict=True))


def _text(value: object) -> str:
    return _MISSING if value is None else repr(value)
