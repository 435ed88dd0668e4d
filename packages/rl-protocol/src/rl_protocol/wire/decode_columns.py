"""Decode untrusted buffers into columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rl_protocol.batch.columns import AnyArray, Column, ColumnType, DenseColumn, ObjectColumn, RaggedColumn
from rl_protocol.batch.dtypes import storage_dtype
from rl_protocol.errors import SchemaError


def column_from_buffers(what: ColumnType, rows: int, buffers: Sequence[memoryview]) -> Column:
    """Rebuild a column as views of raw buffers (the inverse of `Column.buffers`).

    Raises:
        SchemaError: sizes, offsets or names are inconsistent.
    """
    kind, dtype, dims, ragged_dim = what
    if ragged_dim and kind != "ragged":
        raise SchemaError(f"Only ragged columns have a ragged dimension; got {what}.")
    if kind == "dense":
        (raw,) = _expect(buffers, 1, kind)
        return DenseColumn(_view(raw, dtype, (rows, *dims)), dtype)
    raw, raw_offsets = _expect(buffers, 2, kind)
    offsets = _view(raw_offsets, "int64", (rows + 1,))
    if kind == "object":
        if (dtype, dims) != ("object", ()):
            raise SchemaError(f"An object column has dtype 'object' and no dims; got {dtype!r}, {dims}.")
        return ObjectColumn(_view(raw, "uint8", (raw.nbytes,)), offsets)
    if kind == "ragged":
        item = storage_dtype(dtype).itemsize * math.prod(dims)
        length = raw.nbytes // item if item else int(offsets.flat[-1])
        return RaggedColumn(_view(raw, dtype, (length, *dims)), offsets, dtype, ragged_dim)
    raise SchemaError(f"Unknown column kind {kind!r}; known are dense, ragged, object.")


def _expect(buffers: Sequence[memoryview], count: int, kind: str) -> Sequence[memoryview]:
    if len(buffers) != count:
        raise SchemaError(f"A {kind} column has {count} buffer(s); got {len(buffers)}.")
    return buffers


def _view(raw: memoryview, dtype: str, shape: tuple[int, ...]) -> AnyArray:
    store = storage_dtype(dtype)
    want = store.itemsize * math.prod(shape)
    if any(d < 0 for d in shape) or raw.nbytes != want:
        raise SchemaError(f"A {dtype} buffer of shape {shape} has {want} bytes; got {raw.nbytes}.")
    try:
        return np.frombuffer(raw, dtype=store).reshape(shape) if want else np.zeros(shape, store)
    except ValueError as error:  # too many or too large dimensions for numpy
        raise SchemaError(f"No {dtype} array can have shape {shape}: {error}.") from error
