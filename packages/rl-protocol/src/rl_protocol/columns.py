"""The three kinds of column. Each is immutable, has N rows, and is made of a few flat buffers.

    kind     buffers              row i
    dense    values [N, *dims]    values[i]
    ragged   values [T, *dims],   values[offsets[i] : offsets[i + 1]]
             offsets [N + 1]      with its first dimension moved to place `ragged_dim`
    object   data [bytes],        msgpack of data[offsets[i] : offsets[i + 1]]
             offsets [N + 1]

A ragged column stays ragged when all its rows have one length; empty rows and N = 0 are legal everywhere. Rows may be ragged in any one
dimension: rows [3, L] (the position ids of a vision-language model) have `dims` (3,) and `ragged_dim` 1, and are stored as [T, 3], so that
each row is one range of bytes. Rows that differ in more than one dimension, such as images, are two columns: see `rl_protocol.arrays`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from rl_protocol.dtypes import dtype_name, storage_dtype
from rl_protocol.errors import UNREADABLE, BatchError, SchemaError, WireError

Kind = Literal["dense", "ragged", "object"]
AnyArray: TypeAlias = npt.NDArray[Any]
Offsets: TypeAlias = npt.NDArray[np.int64]


class ColumnType(NamedTuple):
    """What two columns must share to be stacked, and what a schema declares."""

    kind: str
    dtype: str = "object"
    dims: tuple[int, ...] = ()
    ragged_dim: int = 0

    def __str__(self) -> str:
        where = f", ragged in dimension {self.ragged_dim}" if self.ragged_dim else ""
        return f"{self.kind} {self.dtype} with dims {list(self.dims)}{where}"


def frozen(array: AnyArray) -> AnyArray:
    """The same memory as a C-contiguous array that refuses writes."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def check_offsets(offsets: AnyArray, total: int) -> Offsets:
    """Offsets as int64 [N + 1], checked to start at 0, never fall, and end at `total`.

    Raises:
        SchemaError: they do not.
    """
    checked: Offsets = frozen(np.asarray(offsets, dtype=np.int64))
    ok = checked.ndim == 1 and checked.size >= 1 and checked[0] == 0 and checked[-1] == total
    if not ok or bool(np.any(np.diff(checked) < 0)):
        raise SchemaError(
            f"Offsets of a ragged column must be one-dimensional, start at 0, never decrease and end at {total}; got "
            f"shape {checked.shape}, first {checked.flat[:1].tolist()}, last {checked.flat[-1:].tolist()}."
        )
    return checked


def offsets_from_lengths(lengths: AnyArray | Sequence[int]) -> Offsets:
    """Row lengths [N] -> offsets [N + 1]."""
    counts = np.asarray(lengths, dtype=np.int64)
    offsets = np.zeros(counts.size + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def gather_ranges(offsets: Offsets, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], Offsets]:
    """Flat positions of the chosen rows, in order, and the offsets they get."""
    lengths = np.diff(offsets)[rows]
    new = offsets_from_lengths(lengths)
    flat = np.arange(new[-1], dtype=np.int64) + np.repeat(offsets[:-1][rows] - new[:-1], lengths)
    return flat, new


def _check_storage(values: AnyArray, dtype: str) -> AnyArray:
    want = storage_dtype(dtype)
    if values.dtype != want:
        raise SchemaError(f"Values of a {dtype} column must be stored as {want.name}; got {values.dtype.name}.")
    return frozen(values)


@dataclass(frozen=True, slots=True, eq=False)
class DenseColumn:
    """Rows of one shape. `values` [N, *dims] in the storage dtype of `dtype`."""

    values: AnyArray
    dtype: str

    def __post_init__(self) -> None:
        if self.values.ndim < 1:
            raise SchemaError("A dense column needs a row dimension; got a scalar.")
        object.__setattr__(self, "values", _check_storage(self.values, self.dtype))

    @property
    def kind(self) -> Kind:
        return "dense"

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(self.values.shape[1:])

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @property
    def buffers(self) -> tuple[AnyArray, ...]:
        return (self.values,)

    def __len__(self) -> int:
        return int(self.values.shape[0])

    def row(self, i: int) -> AnyArray:
        return self.values[i]

    def take(self, rows: npt.NDArray[np.int64]) -> DenseColumn:
        return DenseColumn(self.values[rows], self.dtype)

    def span(self, start: int, stop: int) -> DenseColumn:
        """Rows start..stop without copying."""
        return DenseColumn(self.values[start:stop], self.dtype)

    def __reduce__(self) -> tuple[type[DenseColumn], tuple[object, ...]]:
        return DenseColumn, (self.values, self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class RaggedColumn:
    """Rows of different length. `values` [T, *dims] in the storage dtype of `dtype`; `offsets` int64 [N + 1].

    Row i has shape [*dims[:ragged_dim], L_i, *dims[ragged_dim:]].
    """

    values: AnyArray
    offsets: Offsets
    dtype: str
    ragged_dim: int = 0

    def __post_init__(self) -> None:
        if self.values.ndim < 1:
            raise SchemaError("A ragged column needs a flat values array; got a scalar.")
        if not 0 <= self.ragged_dim < self.values.ndim:
            raise SchemaError(
                f"Rows with dims {list(self.dims)} can be ragged in dimension 0..{len(self.dims)}; got {self.ragged_dim}."
            )
        object.__setattr__(self, "values", _check_storage(self.values, self.dtype))
        object.__setattr__(self, "offsets", check_offsets(self.offsets, int(self.values.shape[0])))

    @property
    def kind(self) -> Kind:
        return "ragged"

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(self.values.shape[1:])

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.offsets.nbytes

    @property
    def buffers(self) -> tuple[AnyArray, ...]:
        return (self.values, self.offsets)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Length of every row, int64 [N]."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return int(self.offsets.size - 1)

    def row(self, i: int) -> AnyArray:
        i = range(len(self))[i]
        return np.moveaxis(self.values[self.offsets[i] : self.offsets[i + 1]], 0, self.ragged_dim)

    def rows(self) -> list[AnyArray]:
        """All rows as views."""
        return [self.row(i) for i in range(len(self))]

    def take(self, rows: npt.NDArray[np.int64]) -> RaggedColumn:
        flat, offsets = gather_ranges(self.offsets, rows)
        return RaggedColumn(self.values[flat], offsets, self.dtype, self.ragged_dim)

    def span(self, start: int, stop: int) -> RaggedColumn:
        """Rows start..stop; the values are not copied."""
        part = self.offsets[start : stop + 1]
        return RaggedColumn(self.values[part[0] : part[-1]], part - part[0], self.dtype, self.ragged_dim)

    def padded(self, width: int | None = None, fill: float = 0) -> AnyArray:
        """Copy padded at the end of the ragged dimension: [N, *dims[:ragged_dim], width, *dims[ragged_dim:]].

        `width` defaults to the longest row.

        Raises:
            BatchError: a row is longer than `width`.
        """
        lengths = self.lengths
        longest = int(lengths.max(initial=0))
        width = longest if width is None else width
        if longest > width:
            raise BatchError(f"Row {int(lengths.argmax())} has {longest} elements, more than the width {width}.")
        out = np.full((len(self), width, *self.dims), fill, dtype=self.values.dtype)
        out[np.arange(width)[None, :] < lengths[:, None]] = self.values
        return np.moveaxis(out, 1, self.ragged_dim + 1)

    def __reduce__(self) -> tuple[type[RaggedColumn], tuple[object, ...]]:
        return RaggedColumn, (self.values, self.offsets, self.dtype, self.ragged_dim)


@dataclass(frozen=True, slots=True, eq=False)
class ObjectColumn:
    """Strings, bytes and records (anything msgpack can say), kept encoded and decoded when read.

    `data` uint8 [bytes]; `offsets` int64 [N + 1]. Build it with `from_values`.
    """

    data: AnyArray
    offsets: Offsets

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", _check_storage(self.data, "uint8"))
        object.__setattr__(self, "offsets", check_offsets(self.offsets, int(self.data.size)))

    @classmethod
    def from_values(cls, values: Iterable[Any]) -> ObjectColumn:
        """Encode each value.

        Raises:
            SchemaError: a value that msgpack can't say; names the row.
        """
        parts: list[bytes] = []
        for i, value in enumerate(values):
            try:
                parts.append(msgspec.msgpack.encode(value))
            except (TypeError, NotImplementedError, OverflowError, RecursionError) as error:
                raise SchemaError(
                    f"Row {i} of an object column, a {type(value).__name__}, can't be encoded: {error}."
                ) from error
        data = np.frombuffer(b"".join(parts), dtype=np.uint8)
        return cls(data, offsets_from_lengths([len(p) for p in parts]))

    @property
    def kind(self) -> Kind:
        return "object"

    @property
    def dtype(self) -> str:
        return "object"

    @property
    def dims(self) -> tuple[int, ...]:
        return ()

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.offsets.nbytes

    @property
    def buffers(self) -> tuple[AnyArray, ...]:
        return (self.data, self.offsets)

    def __len__(self) -> int:
        return int(self.offsets.size - 1)

    def row(self, i: int) -> Any:
        """Row i decoded.

        Raises:
            WireError: its bytes, received from elsewhere, are not msgpack.
        """
        i = range(len(self))[i]
        try:
            return msgspec.msgpack.decode(self.data[self.offsets[i] : self.offsets[i + 1]].data)
        except UNREADABLE as error:
            raise WireError(f"Row {i} of an object column is not msgpack: {error}.") from error

    def values(self) -> list[Any]:
        """Every row decoded."""
        return [self.row(i) for i in range(len(self))]

    def take(self, rows: npt.NDArray[np.int64]) -> ObjectColumn:
        flat, offsets = gather_ranges(self.offsets, rows)
        return ObjectColumn(self.data[flat], offsets)

    def span(self, start: int, stop: int) -> ObjectColumn:
        """Rows start..stop; the data is not copied."""
        part = self.offsets[start : stop + 1]
        return ObjectColumn(self.data[part[0] : part[-1]], part - part[0])

    def __reduce__(self) -> tuple[type[ObjectColumn], tuple[object, ...]]:
        return ObjectColumn, (self.data, self.offsets)


Column: TypeAlias = DenseColumn | RaggedColumn | ObjectColumn


def column_type(column: Column) -> ColumnType:
    """Kind, element type and shape of a column."""
    ragged_dim = column.ragged_dim if isinstance(column, RaggedColumn) else 0
    return ColumnType(column.kind, column.dtype, column.dims, ragged_dim)


def dense(values: AnyArray | Sequence[Any], dtype: str | None = None) -> DenseColumn:
    """A dense column from an array [N, *dims]; `dtype` names the element type where numpy has no such type (bfloat16, fp8)."""
    array = np.asarray(values)
    return DenseColumn(array, dtype_name(array) if dtype is None else dtype)


def ragged(rows: Sequence[AnyArray | Sequence[Any]], dtype: str, ragged_dim: int = 0) -> RaggedColumn:
    """A ragged column from a list of rows of element type `dtype` that differ in dimension `ragged_dim` alone: [L_i, *dims] if it is 0.

    An empty list `[]` fits any dims. Rows of bfloat16 and fp8 are given as arrays of their bits (uint16, uint8): numpy has no such types.

    Raises:
        SchemaError: the rows do not agree in the other dimensions, or hold values that `dtype` can't; names the row.
    """
    store = storage_dtype(dtype)
    arrays = [_as_storage(row, store, f"Row {i} of a ragged {dtype} column") for i, row in enumerate(rows)]
    arrays = [a if a.shape == (0,) else _ragged_first(a, ragged_dim, i) for i, a in enumerate(arrays)]
    dims = next((a.shape[1:] for a in arrays if a.shape != (0,)), ())
    arrays = [a.reshape(0, *dims) if a.shape == (0,) else a for a in arrays]
    if len({a.shape[1:] for a in arrays}) > 1:
        raise SchemaError(
            f"Rows of a ragged column must agree in all dimensions but number {ragged_dim}; got {[np.shape(row) for row in rows][:8]}."
        )
    values = np.concatenate(arrays) if arrays else np.zeros(0, store)
    return RaggedColumn(values, offsets_from_lengths([a.shape[0] for a in arrays]), dtype, ragged_dim)


def _ragged_first(row: AnyArray, ragged_dim: int, number: int) -> AnyArray:
    if not 0 <= ragged_dim < row.ndim:
        raise SchemaError(f"Row {number} of shape {row.shape} has no dimension {ragged_dim} to be ragged in.")
    return np.moveaxis(row, ragged_dim, 0)


def _as_storage(row: AnyArray | Sequence[Any], store: np.dtype[np.generic], where: str) -> AnyArray:
    """The row in its storage dtype; floats may lose precision, nothing else may change its value."""
    array = np.asarray(row)
    if array.ndim < 1:
        raise SchemaError(f"{where} must be a sequence of elements; got the scalar {row!r}.")
    if array.dtype == store or array.size == 0:
        return array.astype(store, copy=False)
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and store.kind in "iu"):
        raise SchemaError(f"{where} is stored as {store.name} and can't take {array.dtype.name} values.")
    out = array.astype(store)
    if store.kind in "iu" and not np.can_cast(array.dtype, store) and not np.array_equal(out, array):
        raise SchemaError(f"{where}: values {array.min()}..{array.max()} do not fit {store.name}.")
    return out


def concat_columns(parts: Sequence[Column], name: str) -> Column:
    """Stack columns of one kind, element type and dims; a single part is returned as it is.

    Raises:
        BatchError: the parts differ; names the column.
    """
    if len(parts) == 1:
        return parts[0]
    shapes = {column_type(p) for p in parts}
    if len(shapes) > 1:
        raise BatchError(
            f"Column {name!r} differs between the parts to concatenate: {'; '.join(sorted(map(str, shapes)))}."
        )
    first = parts[0]
    flat = np.concatenate([p.buffers[0] for p in parts])
    if isinstance(first, DenseColumn):
        return DenseColumn(flat, first.dtype)
    offsets = offsets_from_lengths(np.concatenate([np.diff(p.buffers[1]) for p in parts]))
    if isinstance(first, RaggedColumn):
        return RaggedColumn(flat, offsets, first.dtype, first.ragged_dim)
    return ObjectColumn(flat, offsets)
