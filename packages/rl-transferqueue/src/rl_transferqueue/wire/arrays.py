"""Types of the arrays that name rows and cells."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]


def unpack_ints(packed: bytes) -> tuple[int, ...]:
    """The integers of little-endian int64 bytes.

    >>> unpack_ints(b"\\x05" + bytes(7))
    (5,)
    """
    return tuple(np.frombuffer(packed, "<i8").tolist())


def span_of(numbers: Ints) -> slice | None:
    """The numbers as a slice, if each follows the one before."""
    if numbers.size and int(numbers[-1]) - int(numbers[0]) == numbers.size - 1 and bool((np.diff(numbers) == 1).all()):
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return None
