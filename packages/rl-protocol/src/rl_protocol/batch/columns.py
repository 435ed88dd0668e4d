"""Dense, ragged and object columns: immutable, N rows each, stored as flat buffers.

    kind     buffers              row i
    dense    values [N, *dims]    values[i]
    ragged   values [T, *dims],   values[offsets[i] : offsets[i + 1]]
             offsets [N + 1]      with its first dimension moved to position `ragged_dim`
    object   data [bytes],        msgpack of data[offsets[i] : offsets[i + 1]]
             offsets [N + 1]

A ragged column stays ragged if all its rows have the same length. Empty rows and N = 0 are legal.
Rows may be ragged in any one dimension: rows [3, L] (position ids of a vision-language model) have
`dims` (3,) and `ragged_dim` 1 and are stored as [T, 3], so each row is one range of bytes. Rows
that differ in several dimensions, such as images, need two columns: see
`rl_protocol.batch.packed_arrays`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from rl_protocol.batch.dtypes import dtype_name, storage_dtype
from rl_protocol.errors import UNREADABLE, BatchError, SchemaError, WireError

Kind = Literal["dense", "ragged", "object"]
AnyArray: TypeAlias = npt.NDArray[Any]
Offsets: TypeAlias = npt.NDArray[np.int64]


class ColumnType(NamedTuple):
    """Kind, element type and shape of a column; only columns of one type can be concatenated."""

    kind: str
    dtype: str = "object"
    dims: tuple[int, ...] = ()
    ragged_dim: int = 0

    def __str__(self) -> str:
        where = f", ragged in dimension {self.ragged_dim}" if self.ragged_dim else ""
        return f"{self.kind} {self.dtype} with dims {list(self.dims)}{where}"


def frozen(array: AnyArray) -> AnyArray:
    """A read-only, C-contiguous view of the array (a copy if it is not contiguous)."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def check_offsets(offsets: AnyArray, total: int) -> Offsets:
    """Check that the offsets start at 0, never decrease and end at `total`.

    Returns:
        The offsets as int64 [N + 1].

    Raises:
        SchemaError: the offsets break one of these rules.
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
    """The flat positions of the selected rows, in order, and their new offsets."""
    lengths = np.diff(offsets)[rows]
    new = offsets_from_lengths(lengths)
    flat = np.arange(new[-1], dtype=np.int64) + np.repeat(offsets[:-1][rows] - new[:-1], lengths)
    return flat, new


def _check_storage(values: AnyArray, dtype: str) -> AnyArray:
    want = storage_dtype(dtype)
    if values.dtype != want:
        do = f"convert them with astype({want.name!r})" if want.name == dtype else f"numpy lacks {dtype}: give its bits"
        raise SchemaError(f"Values of a {dtype} column must be stored as {want.name}; got {values.dtype.name}: {do}.")
    return frozen(values)


@dataclass(frozen=True, slots=True, eq=False)
class DenseColumn:
    """Rows of one shape: `values` [N, *dims] in the storage dtype of `dtype`."""

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
        """Rows start..stop as a view."""
        return DenseColumn(self.values[start:stop], self.dtype)

    def __reduce__(self) -> tuple[type[DenseColumn], tuple[object, ...]]:
        return DenseColumn, (self.values, self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class RaggedColumn:
    """Rows of different lengths.

    `values` is [T, *dims] in the storage dtype of `dtype`, `offsets` int64 [N + 1].
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
        """The length of every row, int64 [N]."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return int(self.offsets.size - 1)

    def row(self, i: int) -> AnyArray:
        i = range(len(self))[i]
        return np.moveaxis(self.values[self.offsets[i] : self.offsets[i + 1]], 0, self.ragged_dim)

    def rows(self) -> list[AnyArray]:
        """All rows as views."""
        ends = self.offsets.tolist()
        rows = [self.values[start:stop] for start, stop in pairwise(ends)]
        return [np.moveaxis(row, 0, self.ragged_dim) for row in rows] if self.ragged_dim else rows

    def take(self, rows: npt.NDArray[np.int64]) -> RaggedColumn:
        flat, offsets = gather_ranges(self.offsets, rows)
        return RaggedColumn(self.values[flat], offsets, self.dtype, self.ragged_dim)

    def span(self, start: int, stop: int) -> RaggedColumn:
        """Rows start..stop; the values are a view."""
        part = self.offsets[start : stop + 1]
        return RaggedColumn(self.values[part[0] : part[-1]], part - part[0], self.dtype, self.ragged_dim)

    def padded(self, width: int | None = None, fill: float = 0) -> AnyArray:
        """Copy padded at the end of the ragged dimension.

        The result is [N, *dims[:ragged_dim], width, *dims[ragged_dim:]]; `width` defaults to the
        longest row.

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
    """Strings, bytes and records: any msgpack value, stored encoded and decoded when read.

    `data` is uint8 [bytes], `offsets` int64 [N + 1]. Build it with `from_values`.
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
            SchemaError: msgpack can't encode a value; names the row.
        """
        parts: list[bytes] = []
        for i, value in enumerate(values):
            try:
                parts.append(msgspec.msgpack.encode(value))
            except (TypeError, ValueError, NotImplementedError, OverflowError, RecursionError) as error:
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
            WireError: the bytes of the row are not msgpack.
        """
        i = range(len(self))[i]
        try:
            return msgspec.msgpack.decode(self.data[self.offsets[i] : self.offsets[i + 1]].data)
        except UNREADABLE as error:
            raise WireError(f"Row {i} of an object column is not msgpack: {error}.") from error

    def values(self) -> list[Any]:
        """Every row decoded.

        Raises:
            WireError: the bytes of a row are not msgpack.
        """
        data, decode = self.data.data, msgspec.msgpack.Decoder[Any]().decode
        try:
            return [decode(data[start:stop]) for start, stop in pairwise(self.offsets.tolist())]
        except UNREADABLE:
            return [self.row(i) for i in range(len(self))]  # raises with the number of the row

    def take(self, rows: npt.NDArray[np.int64]) -> ObjectColumn:
        flat, offsets = gather_ranges(self.offsets, rows)
        return ObjectColumn(self.data[flat], offsets)

    def span(self, start: int, stop: int) -> ObjectColumn:
        """Rows start..stop; the data is a view."""
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
    """A dense column from an array [N, *dims]; `dtype` names a type numpy lacks (bfloat16, fp8).

    Raises:
        SchemaError: the rows differ in shape, or the array has a type that can't be stored.
    """
    array = _as_array(values, "The values of a dense column")
    return DenseColumn(array, dtype_name(array) if dtype is None else dtype)


def ragged(rows: Sequence[AnyArray | Sequence[Any]], dtype: str, ragged_dim: int = 0) -> RaggedColumn:
    """A ragged column from rows that differ only in dimension `ragged_dim`.

    Rows are [L_i, *dims] if `ragged_dim` is 0. An empty list `[]` fits any dims. numpy lacks
    bfloat16 and fp8: give such rows as arrays of their bits (uint16, uint8).

    Raises:
        SchemaError: the rows differ in another dimension, or hold values that `dtype` can't; names
            the row.
    """
    store = storage_dtype(dtype)
    if not ragged_dim and (joined := _joined(rows, store, bits=store.name != dtype)) is not None:
        return RaggedColumn(joined, offsets_from_lengths([len(row) for row in rows]), dtype)
    arrays = [
        row
        if isinstance(row, np.ndarray) and row.dtype == store and row.ndim
        else _as_storage(row, store, f"Row {i} of a ragged {dtype} column", bits=store.name != dtype)
        for i, row in enumerate(rows)
    ]
    arrays = [a if a.shape == (0,) else _ragged_first(a, ragged_dim, i) for i, a in enumerate(arrays)]
    dims = next((a.shape[1:] for a in arrays if a.shape != (0,)), ())
    arrays = [a.reshape(0, *dims) if a.shape == (0,) else a for a in arrays]
    if len({a.shape[1:] for a in arrays}) > 1:
        raise SchemaError(
            f"Rows of a ragged column must agree in all dimensions except {ragged_dim}; got {[np.shape(row) for row in rows][:8]}."
        )
    values = np.concatenate(arrays) if arrays else np.zeros(0, store)
    return RaggedColumn(values, offsets_from_lengths([a.shape[0] for a in arrays]), dtype, ragged_dim)


def _joined(rows: Sequence[AnyArray | Sequence[Any]], store: np.dtype[np.generic], *, bits: bool) -> AnyArray | None:
    """The elements of rows that are lists or tuples of numbers, converted at once; None: they are
    something else, or don't fit.
    """
    if not rows or not all(type(row) in (list, tuple) for row in rows):
        return None
    try:
        values = np.array(list(chain.from_iterable(rows)))
        return _as_storage(values, store, "", bits=bits) if values.ndim == 1 else None
    except (ValueError, SchemaError):  # of single rows, the error names one
        return None


def _ragged_first(row: AnyArray, ragged_dim: int, number: int) -> AnyArray:
    if not 0 <= ragged_dim < row.ndim:
        raise SchemaError(f"Row {number} of shape {row.shape} has no dimension {ragged_dim} to be ragged in.")
    return np.moveaxis(row, ragged_dim, 0) if ragged_dim else row  # moveaxis takes longer than all else here


def _as_array(values: AnyArray | Sequence[Any], where: str) -> AnyArray:
    try:
        return np.asarray(values)
    except ValueError as error:  # nested lists of different lengths
        raise SchemaError(f"{where} must have one shape in all dimensions: {error}") from error


def _as_storage(row: AnyArray | Sequence[Any], store: np.dtype[np.generic], where: str, *, bits: bool) -> AnyArray:
    """The row in its storage dtype. Floats may lose precision; no other value may change. With
    `bits` an element is its bits, and numbers of other types are none.
    """
    array = _as_array(row, where)
    if array.ndim < 1:
        raise SchemaError(f"{where} must be a sequence of elements; got the scalar {row!r}.")
    if array.dtype == store or array.size == 0:
        return array.astype(store, copy=False)
    if bits:
        raise SchemaError(f"{where} must be an array of its elements' bits in {store.name}; got {array.dtype.name}.")
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and store.kind in "iu"):
        raise SchemaError(f"{where} is stored as {store.name} and can't take {array.dtype.name} values.")
    out = array.astype(store)
    if store.kind in "iu" and not np.can_cast(array.dtype, store) and not np.array_equal(out, array):
        raise SchemaError(f"{where}: values {array.min()}..{array.max()} do not fit {store.name}.")
    return out


def concat_columns(parts: Sequence[Column], name: str) -> Column:
    """Concatenate columns of one type; a single part is returned unchanged.

    Raises:
        BatchError: the types differ; names the column.
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
