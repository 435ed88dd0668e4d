"""The digest of a tensor, defined so that several threads can compute it and its bytes need not all be there at once.

A tensor is cut into blocks of BLOCK_BYTES, the last one shorter. Its digest is xxh3-128 of its only block, or of the digests of its blocks one
after another (of nothing, when the tensor has no bytes).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xxhash

BLOCK_BYTES = 512 << 10
"""Small enough to be hashed from the cache after it was copied."""


def digest_of(data: bytes | memoryview) -> bytes:
    """xxh3-128 of the bytes, 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def blocks(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Each block with its offset."""
    for start in range(0, data.nbytes, BLOCK_BYTES):
        yield start, data[start : start + BLOCK_BYTES]


def combined(digests: Sequence[bytes]) -> bytes:
    """Digest of a tensor from those of its blocks."""
    return digests[0] if len(digests) == 1 else digest_of(b"".join(digests))


def tensor_digest(data: memoryview) -> bytes:
    """Digest of a tensor, 16 bytes."""
    return combined([digest_of(block) for _, block in blocks(data)])


class TensorDigest:
    """Digest of a tensor whose bytes come by in pieces of any size."""

    def __init__(self) -> None:
        self._done: list[bytes] = []
        self._block = xxhash.xxh3_128()
        self._filled = 0

    def update(self, piece: memoryview) -> None:
        """The next bytes."""
        while piece.nbytes:
            part = piece[: BLOCK_BYTES - self._filled]
            self._block.update(part)
            self._filled += part.nbytes
            piece = piece[part.nbytes :]
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def digest(self) -> bytes:
        """Of everything since the last call; the next tensor begins."""
        if self._filled:
            self._end_block()
        done, self._done = self._done, []
        return combined(done)

    def _end_block(self) -> None:
        self._done.append(self._block.digest())
        self._block.reset()
        self._filled = 0
