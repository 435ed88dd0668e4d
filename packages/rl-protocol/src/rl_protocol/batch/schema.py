"""Schemas: the declared type of each column and the laws between columns, checked at every put."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import cast, get_args

import numpy as np

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import AnyArray, Column, ColumnType, Kind, RaggedColumn, column_type
from rl_protocol.batch.dtypes import storage_dtype
from rl_protocol.errors import SchemaError, UnknownNameError


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSpec:
    """Declaration of one column.

    Attributes:
        name: the column's name.
        kind: dense, ragged or object.
        dtype: element type (see rl_protocol.batch.dtypes); ignored for object columns.
        dims: shape of one row, without its ragged dimension.
        ragged_dim: the dimension of a row that is ragged.
        writer: the stage that writes the column.
        meaning: one line, with the unit.
        absence: what it means if a row lacks the column; empty: the column is required.

    Raises:
        SchemaError: no column can have this kind, element type, `dims` or `ragged_dim`.
    """

    name: str
    kind: Kind
    dtype: str = "object"
    dims: tuple[int, ...] = ()
    ragged_dim: int = 0
    writer: str = ""
    meaning: str = ""
    absence: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise SchemaError(
                f"The kind of column {self.name!r} must be one of {', '.join(get_args(Kind))}; got {self.kind!r}."
            )
        if self.kind != "object":
            storage_dtype(self.dtype)
        object.__setattr__(self, "dims", tuple(self.dims))  # a list would equal no column's
        if not all(isinstance(cast(object, size), int | np.integer) and size >= 0 for size in self.dims):
            raise SchemaError(f"The dims of column {self.name!r} must be integers >= 0; got {list(self.dims)}.")
        most = len(self.dims) if self.kind == "ragged" else 0
        if not 0 <= self.ragged_dim <= most:
            raise SchemaError(
                f"The ragged_dim of {self.kind} column {self.name!r} with dims {list(self.dims)} must be in 0..{most}; got {self.ragged_dim}."
            )

    @property
    def type(self) -> ColumnType:
        return ColumnType(self.kind, self.dtype if self.kind != "object" else "object", self.dims, self.ragged_dim)

    def check(self, column: Column) -> None:
        """Raise SchemaError unless the column has this kind, element type and shape."""
        got = column_type(column)
        if got != self.type:
            raise SchemaError(f"Column {self.name!r}: expected {self.type}, got {got}.")


@dataclass(frozen=True, slots=True)
class SameLength:
    """Law: in every row, the named ragged columns have the same length."""

    columns: tuple[str, ...]

    def check(self, batch: BatchData, keys: Sequence[str] = ()) -> None:
        """Raise SchemaError for the first row that breaks the law; the batch has all columns."""
        first, *others = self.columns
        want = batch.ragged(first).lengths
        for name in others:
            _check_equal(name, batch.ragged(name).lengths, f"len({first})", want, keys)


@dataclass(frozen=True, slots=True)
class LengthIsSum:
    """Law: in every row, `len(values_column) == sum(mask_column)`."""

    values_column: str
    mask_column: str

    def check(self, batch: BatchData, keys: Sequence[str] = ()) -> None:
        """Raise SchemaError for the first row that breaks the law; the batch has both columns."""
        mask = batch.ragged(self.mask_column)
        got, want = batch.ragged(self.values_column).lengths, _row_sums(mask, mask.values.astype(np.int64))
        _check_equal(self.values_column, got, f"sum({self.mask_column})", want, keys)


@dataclass(frozen=True, slots=True)
class LengthIsProduct:
    """Law of packed arrays: in every row, the shapes account for exactly the elements."""

    values_column: str
    shapes_column: str

    def check(self, batch: BatchData, keys: Sequence[str] = ()) -> None:
        """Raise SchemaError for the first row that breaks the law; the batch has both columns."""
        shapes = batch.ragged(self.shapes_column)
        want = _row_sums(shapes, shapes.values.prod(axis=tuple(range(1, shapes.values.ndim)), dtype=np.int64))
        got = batch.ragged(self.values_column).lengths
        _check_equal(self.values_column, got, f"sum(prod({self.shapes_column}))", want, keys)


@dataclass(frozen=True, slots=True)
class LengthIsRuns:
    """Law of run-length encoded columns: in every row, the runs cover exactly the elements.

    A run is [value, count]: `dims` of the column of runs are (2,).
    """

    values_column: str
    runs_column: str

    def check(self, batch: BatchData, keys: Sequence[str] = ()) -> None:
        """Raise SchemaError for the first row that breaks the law; the batch has both columns."""
        runs = batch.ragged(self.runs_column)
        want = _row_sums(runs, runs.values[:, 1].astype(np.int64))
        got = batch.ragged(self.values_column).lengths
        _check_equal(self.values_column, got, f"sum({self.runs_column}[:, 1])", want, keys)


@dataclass(frozen=True, slots=True)
class DistinctIds:
    """Law of packed arrays of ids: those in the last dimension of an array differ, and are 0 or
    more; or they are all -1, which means that there are none.
    """

    values_column: str
    shapes_column: str

    def check(self, batch: BatchData, keys: Sequence[str] = ()) -> None:
        """Raise SchemaError for the first row that breaks the law; the batch has both columns."""
        values, shapes = batch.ragged(self.values_column), batch.ragged(self.shapes_column)
        for row in range(len(batch)):
            at, elements = 0, values.row(row)
            for shape in shapes.row(row).tolist():
                size = math.prod(shape)
                ids = elements[at : at + size].reshape(-1, max(shape[-1], 1))
                at += size
                wrong = np.flatnonzero(_breaks_distinct(ids))
                if wrong.size:
                    raise SchemaError(
                        f"{_row_name(row, keys)}, column {self.values_column!r}: expected different ids of 0 or more, or all -1, got "
                        f"{ids[wrong[0]].tolist()}; {wrong.size} of {len(ids)} groups of ids are like this."
                    )


def _breaks_distinct(ids: AnyArray) -> AnyArray:
    """bool [groups] of ids [groups, width]."""
    ordered = np.sort(ids, axis=1)
    repeated = (ordered[:, 1:] == ordered[:, :-1]).any(1)
    return (repeated | (ordered[:, 0] < 0)) & (ids != -1).any(1)


def _row_sums(column: RaggedColumn, values: AnyArray) -> AnyArray:
    running = np.concatenate([[0], np.cumsum(values)])
    return running[column.offsets[1:]] - running[column.offsets[:-1]]


def _check_equal(column: str, got: AnyArray, law: str, want: AnyArray, keys: Sequence[str]) -> None:
    rows = np.flatnonzero(got != want)
    if rows.size:
        row = int(rows[0])
        raise SchemaError(
            f"{_row_name(row, keys)}, column {column!r}: expected length {law} = {int(want[row])}, got {int(got[row])}; "
            f"{rows.size} of {len(got)} rows are like this."
        )


def _row_name(row: int, keys: Sequence[str]) -> str:
    return f"Row {row} ({keys[row]!r})" if keys else f"Row {row}"


LawOfTwo = LengthIsSum | LengthIsProduct | LengthIsRuns | DistinctIds
"""Laws between two columns, which their fields name."""
AlignmentLaw = SameLength | LawOfTwo


class BatchSchema:
    """The columns a partition may hold and the laws between them.

    >>> from rl_protocol import BatchData, ragged
    >>> schema = BatchSchema(
    ...     [ColumnSpec(name="mask", kind="ragged", dtype="bool"), ColumnSpec(name="logp", kind="ragged", dtype="float32")],
    ...     laws=[LengthIsSum("logp", "mask")],
    ... )
    >>> schema.check(BatchData({"mask": ragged([[1, 0, 1]], "bool"), "logp": ragged([[-0.5]], "float32")}), ["p7/0/0"])
    Traceback (most recent call last):
    rl_protocol.errors.SchemaError: Row 0 ('p7/0/0'), column 'logp': expected length sum(mask) = 2, got 1; 1 of 1 rows are like this.

    Raises:
        SchemaError: a name is declared twice, or a law names a column that is not ragged.
        UnknownNameError: a law names an undeclared column.
    """

    def __init__(self, columns: Iterable[ColumnSpec], laws: Sequence[AlignmentLaw] = ()) -> None:
        self.columns: dict[str, ColumnSpec] = {}
        for spec in columns:
            if spec.name in self.columns:
                raise SchemaError(f"Column {spec.name!r} is declared twice in one schema.")
            self.columns[spec.name] = spec
        self.laws = tuple(laws)
        for law in self.laws:
            for name in _columns(law):
                if self[name].kind != "ragged":
                    raise SchemaError(f"{law} is a law of ragged columns; {name!r} is {self[name].kind}.")

    def __getitem__(self, name: str) -> ColumnSpec:
        try:
            return self.columns[name]
        except KeyError:
            raise UnknownNameError(f"Column {name!r} is not in the schema; it has {', '.join(self.columns)}.") from None

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def check(self, batch: BatchData, keys: Sequence[str] = ()) -> None:
        """Check every column of the batch, and every law as far as its columns are present.

        A stage that writes a column long after the one it must align with checks both:
        `schema.check(written.union(read))`.

        Args:
            batch: the batch.
            keys: [N] row keys for error messages.

        Raises:
            SchemaError: names row, column, expected and got.
            UnknownNameError: a column is not declared.
        """
        for name in batch.field_names:
            self[name].check(batch[name])
        for law in self.laws:
            present = tuple(name for name in _columns(law) if name in batch)
            if len(present) > 1:
                (SameLength(present) if isinstance(law, SameLength) else law).check(batch, keys)


def _columns(law: AlignmentLaw) -> tuple[str, ...]:
    """The columns that a law names."""
    return law.columns if isinstance(law, SameLength) else astuple(law)
