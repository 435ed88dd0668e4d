"""Types of the arrays that name rows and cells."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]


def pack_ints(numbers: Ints) -> bytes:
    """The numbers as little-endian int64; only the first where each follows the one before."""
    return (numbers if span_of(numbers) is None else numbers[:1]).astype("<i8").tobytes()


def unpack_ints(packed: bytes, count: int) -> Ints:
    """The `count` numbers that `pack_ints` packed.

    >>> unpack_ints(pack_ints(np.array([5, 6, 7])), 3)
    array([5, 6, 7])
    """
    numbers = np.frombuffer(packed, "<i8")
    return np.arange(numbers[0], numbers[0] + count) if numbers.size == 1 else numbers


def span_of(numbers: Ints) -> slice | None:
    """The numbers as a slice, if each follows the one before."""
    if numbers.size and int(numbers[-1]) - int(numbers[0]) == numbers.size - 1 and bool((np.diff(numbers) == 1).all()):
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return None
