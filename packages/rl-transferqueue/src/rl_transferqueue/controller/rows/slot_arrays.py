"""Arrays with one element per slot of a partition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

ABSENT = object()
"""Fills an array of objects where a slot has no value."""

Resize: TypeAlias = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]


def grown(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """A copy of `size` elements: those of the array, then `ABSENT` or 0.

    The zeros come from memory that is not touched before it is used.
    """
    out = np.full(size, ABSENT, object) if array.dtype == object else np.zeros(size, array.dtype)
    out[: array.size] = array
    return out
