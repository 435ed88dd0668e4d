"""Batches and comparisons for tests of data planes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import Column, DenseColumn, ObjectColumn, RaggedColumn, column_type, dense, ragged
from rl_protocol.batch.dtypes import STORAGE_DTYPES
from rl_protocol.ports import RowChanges


def keys_of(rows: Iterable[int]) -> list[str]:
    """Keys for numbered rows."""
    return [f"row{i}" for i in rows]


def numbers(values: Iterable[int], name: str = "x") -> BatchData:
    """A batch of one dense int64 column."""
    return BatchData({name: dense(np.array(list(values), dtype=np.int64))})


def assert_same_column(got: Column, want: Column) -> None:
    """Assert equal kind, element type, shape and bytes."""
    assert (column_type(got), len(got)) == (column_type(want), len(want))
    for a, b in zip(got.buffers, want.buffers, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


def every_kind(rows: int) -> BatchData:
    """A batch with a dense and a ragged column of every element type, empty ragged rows, and
    objects."""
    rng = np.random.default_rng(rows)
    columns: dict[str, Column] = {}
    for name, dtype in STORAGE_DTYPES.items():
        raw = rng.integers(0, 2 if name == "bool" else 256, (rows, 3, dtype.itemsize), dtype=np.uint8)
        columns[f"dense_{name}"] = DenseColumn(raw.view(dtype).reshape(rows, 3), name)
        parts = [rng.integers(0, 2, (i * 7) % 4).astype(dtype) for i in range(rows)]
        columns[f"ragged_{name}"] = ragged(parts, name)
    columns["nothing"] = DenseColumn(np.zeros((rows, 0), np.float32), "float32")
    columns["all_empty"] = RaggedColumn(np.zeros((0, 2), np.float32), np.zeros(rows + 1, np.int64), "float32")
    columns["ragged_last"] = ragged([rng.integers(0, 9, (3, i % 3)) for i in range(rows)], "int64", ragged_dim=1)
    columns["equal_lengths"] = ragged([[i, i] for i in range(rows)], "int32")
    pool = ["text", b"bytes", None, {"a": [1, 2.5, True]}, "", 7, "\u00fc"]
    columns["objects"] = ObjectColumn.from_values(pool[i % len(pool)] for i in range(rows))
    return BatchData(columns)


def summary_of(changes: RowChanges) -> tuple[tuple[str, ...], set[str], bool]:
    """The changed keys, the removed keys, and whether all other rows are to be forgotten."""
    return changes.rows.keys, set(changes.removed), changes.reset
