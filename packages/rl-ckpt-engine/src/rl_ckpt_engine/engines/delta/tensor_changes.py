"""Find, encode and apply the changed elements of a tensor, without I/O.

A blob is `u8 bytes per gap, u8 bytes per element, u64 count` (little-endian), followed by zstd of
the gaps and the values. A gap is the distance to the previous position (the first gap is the first
position), stored in the narrowest of 1, 2, 4 or 8 bytes. Values replace the old ones, so applying a
blob twice has no further effect.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard

from rl_protocol.errors import WeightSyncError

_HEAD = struct.Struct("<BBQ")
_WORDS: dict[int, npt.DTypeLike] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BLOCK = 4 << 20
"""Elements compared per block."""
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Change:
    """Positions and new values of changed elements."""

    positions: npt.NDArray[np.int64]
    """[C], ascending."""
    values: npt.NDArray[np.unsignedinteger]
    """[C], elements as unsigned integers of their width."""

    def apply(self, data: Bytes) -> Change:
        """Write the values into the bytes of a tensor; returns the replaced values."""
        words = data.view(self.values.dtype)
        before = Change(self.positions, words[self.positions])
        words[self.positions] = self.values
        return before


def compare(old: Bytes, new: Bytes, itemsize: int) -> Change:
    """Find the elements whose bits differ; both arrays are [nbytes]."""
    before, after = old.view(_WORDS[itemsize]), new.view(_WORDS[itemsize])
    found = [
        np.flatnonzero(before[at : at + _BLOCK] != after[at : at + _BLOCK]) + at for at in range(0, before.size, _BLOCK)
    ]
    positions = np.concatenate(found) if found else np.empty(0, np.int64)
    return Change(positions.astype(np.int64, copy=False), after[positions])


def encode(change: Change) -> bytes:
    """Encode a change of at least one element as a blob."""
    gaps = np.diff(change.positions, prepend=0)
    width = next(width for width in _WORDS if int(gaps.max()) < 1 << (8 * width))
    head = _HEAD.pack(width, change.values.itemsize, change.positions.size)
    body = gaps.astype(_WORDS[width]).tobytes() + change.values.tobytes()
    return head + zstandard.ZstdCompressor(level=1).compress(body)


def decode(blob: bytes | memoryview, itemsize: int, count: int) -> Change:
    """The inverse of `encode`.

    Args:
        blob: the blob.
        itemsize: bytes per element of the tensor.
        count: number of elements of the tensor.

    Raises:
        WeightSyncError: the blob is malformed or does not fit the tensor.
    """
    if len(blob) < _HEAD.size:
        raise WeightSyncError(f"A change of {len(blob)} bytes is too short.")
    width, size, changed = _HEAD.unpack_from(blob)
    if width not in _WORDS or size != itemsize or not 0 < changed <= count:
        raise WeightSyncError(
            f"A change of {changed} elements of {size} bytes does not fit {count} of {itemsize} bytes."
        )
    want = changed * (width + size)
    try:
        body = zstandard.ZstdDecompressor().decompress(blob[_HEAD.size :], max_output_size=want)
    except zstandard.ZstdError as error:
        raise WeightSyncError(f"A change can't be decompressed: {error}.") from error
    if len(body) != want:
        raise WeightSyncError(f"A change of {changed} elements decompresses to {len(body)} bytes instead of {want}.")
    gaps = np.frombuffer(body, _WORDS[width], changed).astype(np.int64)
    positions = np.cumsum(gaps)
    if np.any(gaps[1:] <= 0) or gaps[0] < 0 or positions[-1] >= count:
        raise WeightSyncError(f"The positions of a change do not ascend within {count} elements.")
    return Change(positions, np.frombuffer(body, _WORDS[size], changed, changed * width))
