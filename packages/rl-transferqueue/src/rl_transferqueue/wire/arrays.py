"""Types of the arrays that name rows and cells."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

_BYTES = 8
"""Of one packed number."""


def pack_ints(numbers: Ints | range) -> bytes:
    """The numbers as little-endian int64; only the first where each follows the one before.

    Args:
        numbers: those of a range, which is not empty, follow each other.
    """
    if isinstance(numbers, range):
        return numbers[0].to_bytes(_BYTES, "little", signed=True)
    if numbers.size > 1 and span_of(numbers) is not None:
        numbers = numbers[:1]
    return numbers.astype("<i8", copy=False).tobytes()


def unpack_ints(packed: bytes, count: int) -> Ints:
    """The `count` numbers that `pack_ints` packed.

    >>> unpack_ints(pack_ints(np.array([5, 6, 7])), 3)
    array([5, 6, 7])
    """
    numbers = np.frombuffer(packed, "<i8")
    return np.arange(numbers[0], numbers[0] + count) if numbers.size == 1 < count else numbers


def unpack_tuple(packed: bytes, count: int) -> tuple[int, ...]:
    """The same numbers as a tuple, which is faster for few.

    >>> unpack_tuple(pack_ints(np.array([5, 6, 7])), 3)
    (5, 6, 7)
    """
    if len(packed) != _BYTES:
        return tuple(np.frombuffer(packed, "<i8").tolist())
    first = int.from_bytes(packed, "little", signed=True)
    return (first,) if count == 1 else tuple(range(first, first + count))


def span_of(numbers: Ints) -> slice | None:
    """The numbers as a slice, if each follows the one before."""
    if not numbers.size:
        return None
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first == numbers.size - 1 and bool((numbers[1:] - numbers[:-1] == 1).all()):  # np.diff is slower
        return slice(first, last + 1)
    return None
