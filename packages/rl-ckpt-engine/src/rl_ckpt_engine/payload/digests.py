"""Tensor digests: xxh3-128 over blocks, for several threads and incremental input.

A tensor is split into blocks of BLOCK_BYTES; the last one may be shorter. The digest of one block
is its xxh3-128. The digest of any other number of blocks, including none, is the xxh3-128 of their
concatenated digests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xxhash

BLOCK_BYTES = 512 << 10
"""Source and copy of a block fit in a cache of 1 MiB, in which it is then hashed."""


def digest_of(data: bytes | memoryview) -> bytes:
    """The xxh3-128 of the bytes, 16 bytes long."""
    return xxhash.xxh3_128_digest(data)


def blocks(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield each block with its offset."""
    for start in range(0, data.nbytes, BLOCK_BYTES):
        yield start, data[start : start + BLOCK_BYTES]


def combined(digests: Sequence[bytes]) -> bytes:
    """The digest of a tensor from the digests of its blocks."""
    return digests[0] if len(digests) == 1 else digest_of(b"".join(digests))


def tensor_digest(data: memoryview) -> bytes:
    """The digest of a tensor, 16 bytes long."""
    return combined([digest_of(block) for _, block in blocks(data)])


class TensorDigest:
    """Computes tensor digests incrementally, from pieces of any size."""

    def __init__(self) -> None:
        self._done: list[bytes] = []
        self._block = xxhash.xxh3_128()
        self._filled = 0

    def update(self, piece: memoryview) -> None:
        """Add the next bytes of the tensor."""
        while piece.nbytes:
            part = piece[: BLOCK_BYTES - self._filled]
            self._block.update(part)
            self._filled += part.nbytes
            piece = piece[part.nbytes :]
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def digest(self) -> bytes:
        """Return the digest and start the next tensor."""
        if self._filled:
            self._end_block()
        done, self._done = self._done, []
        return combined(done)

    def _end_block(self) -> None:
        self._done.append(self._block.digest())
        self._block.reset()
        self._filled = 0
