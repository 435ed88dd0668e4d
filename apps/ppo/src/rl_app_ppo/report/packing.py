"""Packs a header and typed columns into one compressed block, which report_ui/src/data.ts reads.

uint32 little endian: bytes of the header | header, JSON | padding to 8 | columns, each at a
multiple of 8 | all gzip
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

_NUMBERS = {"i1": np.int8, "u1": np.uint8, "i2": np.int16, "i4": np.int32, "f4": np.float32, "f8": np.float64}


class ColumnPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a column is: its type, its offset in bytes, and its number of elements."""

    dtype: str
    at: int
    size: int


class Packer:
    """Collects the columns of a block."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, dtype: str, values: Sequence[float]) -> ColumnPlace:
        """Add a column of one of the types i1, u1, i2, i4, f4 and f8; None in floats is NaN."""
        array = np.asarray(values, dtype=_NUMBERS[dtype])
        data = array.tobytes()
        place = ColumnPlace(dtype, self._size, array.size)
        data += b"\0" * (-len(data) % 8)
        self._parts.append(data)
        self._size += len(data)
        return place

    def pack(self, header: object, clean: Callable[[bytes], bytes]) -> bytes:
        """The block; `clean` changes the JSON of the header, such as to remove secrets."""
        encoded = clean(msgspec.json.encode(header))
        encoded += b" " * (-(4 + len(encoded)) % 8)
        return gzip.compress(b"".join((struct.pack("<I", len(encoded)), encoded, *self._parts)), 9, mtime=0)
