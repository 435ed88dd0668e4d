"""BatchData: an ordered set of columns over N rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import cast

import numpy as np

from rl_protocol.batch.columns import (
    AnyArray,
    Column,
    DenseColumn,
    ObjectColumn,
    RaggedColumn,
    column_type,
    concat_columns,
)
from rl_protocol.batch.row_ops import Indices, RowOps, check_indices
from rl_protocol.counted import counted
from rl_protocol.errors import BatchError, SchemaError, UnknownNameError


class BatchData(RowOps):
    """An immutable, ordered set of named columns with the same number of rows.

    >>> from rl_protocol import BatchData, dense, ragged
    >>> batch = BatchData({"score": dense([0.0, 1.0]), "responses": ragged([[5, 6], [7]], "int32")})
    >>> len(batch), batch.field_names, batch.ragged("responses").lengths.tolist()
    (2, ('score', 'responses'), [2, 1])

    Args:
        columns: name -> column, all of one length.
        num_rows: needed only if there are no columns.

    Raises:
        SchemaError: two columns differ in length; names both. Or a value is no column.
    """

    def __init__(self, columns: Mapping[str, Column], num_rows: int | None = None) -> None:
        for name, column in columns.items():
            if not isinstance(cast(object, column), Column):
                raise SchemaError(
                    f"Column {name!r} must be a DenseColumn, RaggedColumn or ObjectColumn, such as dense(..) makes; got {type(column).__name__}."
                )
        sizes = {name: len(column) for name, column in columns.items()}
        rows = num_rows if num_rows is not None else next(iter(sizes.values()), 0)
        if rows < 0:
            raise SchemaError(f"A batch can't have {rows} rows; num_rows must be >= 0.")
        for name, size in sizes.items():
            if size != rows:
                first = next(iter(sizes))
                raise SchemaError(
                    f"Column {name!r} has {counted(size, 'row')}, the batch has {rows} (set by {first!r} or num_rows)."
                )
        self._columns = MappingProxyType(dict(columns))
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, name: str) -> Column:
        try:
            return self._columns[name]
        except KeyError:
            raise UnknownNameError(
                f"No column {name!r} in this batch; it has {', '.join(self._columns) or 'none'}."
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __bool__(self) -> bool:
        return self._rows > 0

    @property
    def field_names(self) -> tuple[str, ...]:
        return tuple(self._columns)

    @property
    def columns(self) -> Mapping[str, Column]:
        return self._columns

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, offsets included."""
        return sum(column.nbytes for column in self._columns.values())

    def dense(self, name: str) -> DenseColumn:
        """The column, checked to be dense (SchemaError otherwise)."""
        column = self[name]
        if not isinstance(column, DenseColumn):
            raise SchemaError(f"Column {name!r} is {column.kind}, not dense.")
        return column

    def ragged(self, name: str) -> RaggedColumn:
        """The column, checked to be ragged (SchemaError otherwise)."""
        column = self[name]
        if not isinstance(column, RaggedColumn):
            raise SchemaError(f"Column {name!r} is {column.kind}, not ragged.")
        return column

    def objects(self, name: str) -> ObjectColumn:
        """The column, checked to hold objects (SchemaError otherwise)."""
        column = self[name]
        if not isinstance(column, ObjectColumn):
            raise SchemaError(f"Column {name!r} is {column.kind}, not object.")
        return column

    def __repr__(self) -> str:
        parts = ", ".join(f"{n}: {c.kind} {c.dtype}{list(c.dims) or ''}" for n, c in self._columns.items())
        return f"BatchData({counted(self._rows, 'row')}; {parts})"

    def __reduce__(self) -> tuple[type[BatchData], tuple[object, ...]]:
        """Rebuild through the checking constructors; protocol 5 need not copy the buffers."""
        return BatchData, (dict(self._columns), self._rows)

    def select_rows(self, rows: Indices) -> BatchData:
        """The rows in the given order; a row may occur more than once."""
        if isinstance(rows, range) and rows.step == 1 and 0 <= rows.start <= rows.stop <= self._rows:
            return BatchData({n: c.span(rows.start, rows.stop) for n, c in self._columns.items()}, len(rows))
        index = check_indices(rows, self._rows)
        return BatchData({n: c.take(index) for n, c in self._columns.items()}, int(index.size))

    def select_fields(self, names: Sequence[str]) -> BatchData:
        """The named columns, in that order.

        Raises:
            UnknownNameError: there is no such column.
        """
        return BatchData({name: self[name] for name in names}, self._rows)

    def union(self, other: BatchData) -> BatchData:
        """Columns of both over the same rows; a shared name must hold the same bytes.

        Raises:
            BatchError: the row counts or the values of a shared column differ.
        """
        if len(other) != self._rows:
            raise BatchError(f"union needs equal row counts; got {self._rows} and {len(other)}.")
        for name in self._columns.keys() & other.columns.keys():
            if not _same(self[name], other[name]):
                raise BatchError(
                    f"union: column {name!r} is in both batches with different values; select_fields one of them away."
                )
        return BatchData({**self._columns, **other.columns}, self._rows)

    def repeat(self, times: int) -> BatchData:
        """Every row `times` times, with the copies next to each other.

        Raises:
            BatchError: times < 1.
        """
        if times < 1:
            raise BatchError(f"repeat needs times >= 1; got {times}.")
        return self.select_rows(np.repeat(np.arange(self._rows), times))

    @classmethod
    def concat(cls, parts: Sequence[BatchData]) -> BatchData:
        """Rows of all parts in order; the parts must have the same columns.

        Raises:
            BatchError: there are no parts, or their columns differ.
        """
        if not parts:
            raise BatchError("concat needs at least one part; got none.")
        names = parts[0].field_names
        for number, part in enumerate(parts):
            if set(part.field_names) != set(names):
                raise BatchError(
                    f"Part {number} has columns {sorted(part.field_names)}, part 0 has {sorted(names)}; "
                    "concat never drops columns: select_fields first."
                )
        rows = sum(len(part) for part in parts)
        return BatchData({name: concat_columns([part[name] for part in parts], name) for name in names}, rows)


def _same(a: Column, b: Column) -> bool:
    if column_type(a) != column_type(b):
        return False
    return all(_bytes_equal(x, y) for x, y in zip(a.buffers, b.buffers, strict=True))


def _bytes_equal(x: AnyArray, y: AnyArray) -> bool:
    return x.shape == y.shape and np.array_equal(x.reshape(-1).view(np.uint8), y.reshape(-1).view(np.uint8))
