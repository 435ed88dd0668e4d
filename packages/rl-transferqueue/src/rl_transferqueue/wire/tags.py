"""Conversion of tags between rows, as callers see them, and columns, as messages carry them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import numpy as np

from rl_protocol.batch.kv_batch_meta import Scalar, Tag, check_tag
from rl_transferqueue.wire.messages import TagColumn

_ALWAYS_LEGAL = {bool, int, str, type(None)}
"""Types of which every value may be a tag; a float may be NaN."""


def to_columns(keys: Sequence[str], tags: Sequence[Tag]) -> tuple[TagColumn, ...]:
    """One column per name.

    >>> to_columns(("a", "b"), ({"n": 1}, {"n": 2}))
    (TagColumn(name='n', values=(1, 2), rows=b''),)

    Raises:
        BatchError: a value that no tag may have; names the row and the tag.
    """
    if len(tags) == 1:
        return tuple(TagColumn(name, (check_tag(keys[0], name, value),)) for name, value in tags[0].items())
    names = tags[0].keys() if tags else ()
    if all(tag.keys() == names for tag in tags):
        return tuple(TagColumn(name, _checked(keys, name, tuple(map(itemgetter(name), tags)))) for name in names)
    values: dict[str, list[Scalar]] = {}
    rows: dict[str, list[int]] = {}
    for i, tag in enumerate(tags):
        for name, value in tag.items():
            values.setdefault(name, []).append(value)
            rows.setdefault(name, []).append(i)

    def column(name: str, of_rows: Sequence[int]) -> TagColumn:
        checked = tuple(values[name])
        if len(of_rows) == len(tags):
            return TagColumn(name, _checked(keys, name, checked))
        named = [keys[i] for i in of_rows]
        return TagColumn(name, _checked(named, name, checked), np.array(of_rows, "<i4").tobytes())

    return tuple(column(name, of_rows) for name, of_rows in rows.items())


def _checked(keys: Sequence[str], name: str, values: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
    """The values of one tag, checked."""
    if type(name) is not str or not set(map(type, values)) <= _ALWAYS_LEGAL:
        for key, value in zip(keys, values, strict=True):
            check_tag(key, name, value)
    return values


def to_rows(columns: Sequence[TagColumn], size: int) -> tuple[Tag, ...]:
    """The tags of `size` rows."""
    whole = [column for column in columns if not column.rows]
    tags = _together([column.name for column in whole], [column.values for column in whole], size)
    for column in columns:
        if column.rows:
            for row, value in zip(np.frombuffer(column.rows, "<i4").tolist(), column.values, strict=True):
                tags[row][column.name] = value
    return tuple(tags)


def _together(names: Sequence[str], values: Sequence[Sequence[Scalar]], size: int) -> list[Tag]:
    """One dict per row; the cases of few columns are several times faster than the general one."""
    if len(names) == 0:
        return [{} for _ in range(size)]
    if len(names) == 1:
        (a,) = names
        return [{a: x} for x in values[0]]
    if len(names) == 2:
        a, b = names
        return [{a: x, b: y} for x, y in zip(*values, strict=True)]
    if len(names) == 3:
        a, b, c = names
        return [{a: x, b: y, c: z} for x, y, z in zip(*values, strict=True)]
    return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]
