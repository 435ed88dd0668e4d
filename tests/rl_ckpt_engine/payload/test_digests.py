"""The digest of a tensor does not depend on how it is computed."""

from __future__ import annotations

import numpy as np
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ckpt_engine.payload.digests import BLOCK_BYTES, TensorDigest, tensor_digest


def test_golden_digests() -> None:
    # XXH3 of the empty input, as in its specification
    assert tensor_digest(memoryview(b"")).hex() == "99aa06d3014798d86001c324468d497f"
    assert tensor_digest(memoryview(b"abc")) == xxhash.xxh3_128(b"abc").digest()
    data = bytes(range(256)) * (BLOCK_BYTES // 128) + b"tail"
    parts = [data[:BLOCK_BYTES], data[BLOCK_BYTES : 2 * BLOCK_BYTES], b"tail"]
    of_parts = b"".join(xxhash.xxh3_128(part).digest() for part in parts)
    assert tensor_digest(memoryview(data)) == xxhash.xxh3_128(of_parts).digest()
    assert tensor_digest(memoryview(data)).hex() == "2a717ab926675a51a831dc9a51d492a7"


@settings(max_examples=20)
@given(st.integers(0, 2 * BLOCK_BYTES + 9), st.lists(st.integers(0, 2 * BLOCK_BYTES), max_size=5), st.integers(0, 9))
def test_pieces_of_any_size_give_the_same_digest(size: int, cuts: list[int], seed: int) -> None:
    data = memoryview(np.random.default_rng(seed).bytes(size))
    digest = TensorDigest()
    for again in range(2):  # the second tensor starts from a clean state
        ends = sorted({min(cut, size) for cut in cuts} | {size})
        for start, end in zip([0, *ends], ends, strict=False):
            digest.update(data[start:end])
        assert digest.digest() == tensor_digest(data), again
