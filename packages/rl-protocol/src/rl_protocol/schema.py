"""Declared contracts of columns, checked at put."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rl_protocol.batch import BatchData
from rl_protocol.columns import AnyArray, Column, Kind
from rl_protocol.dtypes import storage_dtype
from rl_protocol.errors import SchemaError, UnknownNameError


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSpec:
    """What one column holds.

    Attributes:
        name: the column's name.
        kind: dense, ragged or object.
        dtype: element type (see rl_protocol.dtypes); ignored for object.
        dims: shape of one row (dense) or of one element (ragged).
        writer: the stage that writes it.
        meaning: one line: unit, and what absence means.
    """

    name: str
    kind: Kind
    dtype: str = "object"
    dims: tuple[int, ...] = ()
    writer: str = ""
    meaning: str = ""

    def __post_init__(self) -> None:
        if self.kind != "object":
            storage_dtype(self.dtype)

    def check(self, column: Column) -> None:
        """Raise SchemaError unless the column is of this kind, element type and dims."""
        want = (self.kind, self.dtype if self.kind != "object" else "object", self.dims)
        got = (column.kind, column.dtype, column.dims)
        if want != got:
            raise SchemaError(f"Column {self.name!r}: expected {_say(want)}, got {_say(got)}.")


def _say(what: tuple[str, str, tuple[int, ...]]) -> str:
    kind, dtype, dims = what
    return f"{kind} {dtype} with dims {list(dims)}"


@dataclass(frozen=True, slots=True)
class SameLength:
    """Law: in every row, the named ragged columns have equal length."""

    columns: tuple[str, ...]

    def check(self, batch: BatchData) -> None:
        """Raise SchemaError for the first row that breaks the law; columns that are absent are not looked at."""
        present = [name for name in self.columns if name in batch]
        for name in present[1:]:
            _first_difference(present[0], batch.ragged(present[0]).lengths, name, batch.ragged(name).lengths)


@dataclass(frozen=True, slots=True)
class LengthIsSum:
    """Law: in every row, `len(values_column) == sum(mask_column)`."""

    values_column: str
    mask_column: str

    def check(self, batch: BatchData) -> None:
        """Raise SchemaError for the first row that breaks the law; nothing is checked when a column is absent."""
        if self.values_column in batch and self.mask_column in batch:
            mask = batch.ragged(self.mask_column)
            running = np.concatenate([[0], np.cumsum(mask.values, dtype=np.int64)])
            sums = running[mask.offsets[1:]] - running[mask.offsets[:-1]]
            lengths = batch.ragged(self.values_column).lengths
            _first_difference(self.values_column, lengths, f"sum({self.mask_column})", sums)


def _first_difference(a_name: str, a: AnyArray, b_name: str, b: AnyArray) -> None:
    rows = np.flatnonzero(a != b)
    if rows.size:
        row = int(rows[0])
        raise SchemaError(
            f"Row {row}: {a_name!r} has length {int(a[row])} but {b_name!r} gives {int(b[row])}; they must be equal in every row."
        )


AlignmentLaw = SameLength | LengthIsSum


class BatchSchema:
    """The columns a partition may hold and the laws between them.

    Raises:
        SchemaError: the same name declared twice.
    """

    def __init__(self, columns: Iterable[ColumnSpec], laws: Sequence[AlignmentLaw] = ()) -> None:
        self.columns: dict[str, ColumnSpec] = {}
        for spec in columns:
            if spec.name in self.columns:
                raise SchemaError(f"Column {spec.name!r} is declared twice in one schema.")
            self.columns[spec.name] = spec
        self.laws = tuple(laws)

    def __getitem__(self, name: str) -> ColumnSpec:
        try:
            return self.columns[name]
        except KeyError:
            raise UnknownNameError(f"Column {name!r} is not in the schema; it has {', '.join(self.columns)}.") from None

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def check(self, batch: BatchData) -> None:
        """Check every column of the batch and every law.

        Raises:
            SchemaError: names row, column, expected and got.
            UnknownNameError: a column that is not declared.
        """
        for name in batch.field_names:
            self[name].check(batch[name])
        for law in self.laws:
            law.check(batch)
