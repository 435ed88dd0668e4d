"""Array types and segment sums shared by the numpy algorithms."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


def sum_by(labels: npt.NDArray[np.integer], values: npt.ArrayLike, size: int) -> FloatArray:
    """[size] sums of `values` by label 0..size-1, added in the order given."""
    return np.bincount(labels, weights=values, minlength=size).astype(np.float64)


def row_sums(flat: FloatArray, offsets: IntArray) -> FloatArray:
    """[N] sum of every row of a flat token array; `offsets` is [N + 1]."""
    running = np.concatenate([[0.0], np.cumsum(flat)])
    return running[offsets[1:]] - running[offsets[:-1]]
