"""Fields whose rows may differ in kind, dtype or dimensions, as in 0.1.11, and how to read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import Column, column_type, concat_columns
from rl_protocol.batch.kv_batch_meta import KVBatchMeta
from rl_protocol.errors import BatchError
from rl_transferqueue.client.client import Client

Field: TypeAlias = "Column | tuple[Column, ...]"
"""One column of all rows, or one column per row where rows differ in kind, dtype or dimensions."""


HIDDEN_KEY = "\x00"
"""First character of the key of a row that was put without one."""
FIRST = 1
"""The plane's first generation; `global_indexes` begin at 0, because users index arrays by them."""


def indexes_of(rows: KVBatchMeta) -> list[int]:
    """The `global_indexes` of rows."""
    return [generation - FIRST for generation in rows.generations]


@dataclass(frozen=True)
class Table:
    """Fields of N rows."""

    fields: dict[str, Field]
    rows: int

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(column.nbytes for field in self.fields.values() for column in _columns(field))

    def select_rows(self, rows: Sequence[int]) -> Table:
        """The rows in the order given."""
        index = np.asarray(rows, np.int64)
        return Table({name: _taken(field, index.tolist()) for name, field in self.fields.items()}, index.size)

    @classmethod
    def concat(cls, parts: Sequence[Table]) -> Table:
        """Rows of all parts in order; all must have the same fields."""
        names = parts[0].fields
        fields = {name: _joined(name, [part.fields[name] for part in parts]) for name in names}
        return cls(fields, sum(part.rows for part in parts))


def _columns(field: Field) -> tuple[Column, ...]:
    return field if isinstance(field, tuple) else (field,)


def _taken(field: Field, rows: list[int]) -> Field:
    return tuple(field[row] for row in rows) if isinstance(field, tuple) else field.take(np.asarray(rows, np.int64))


def _joined(name: str, parts: Sequence[Field]) -> Field:
    columns = [column for part in parts for column in _columns(part)]
    if len({column_type(column) for column in columns}) == 1:
        return concat_columns(columns, name)
    return tuple(column.span(row, row + 1) for column in columns for row in range(len(column)))


async def read(plane: Client, rows: KVBatchMeta, fields: Sequence[str]) -> Table:
    """Fields of rows.

    Raises:
        MissingDataError: a row or field is missing.
    """
    parts = [Table(dict(batch.columns), len(batch)) for _, batch in await alike(plane, rows, fields)]
    return parts[0] if len(parts) == 1 else Table.concat(parts)


async def alike(plane: Client, rows: KVBatchMeta, fields: Sequence[str]) -> list[tuple[KVBatchMeta, BatchData]]:
    """Fields of rows in consecutive parts within which each field has one kind; usually one part.

    Raises:
        MissingDataError: a row or field is missing.
    """
    try:
        return [(rows, await plane.get(rows, fields))]
    except BatchError:
        if len(rows) < 2:
            raise
    middle = len(rows) // 2
    halves = (rows.slice(0, middle), rows.slice(middle, len(rows)))
    return [part for half in halves for part in await alike(plane, half, fields)]
