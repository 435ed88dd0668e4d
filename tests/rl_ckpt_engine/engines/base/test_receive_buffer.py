"""ReceiveBuffer: buckets cover the missing tensors; verified tensors are kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from itertools import pairwise

import pytest
from ckpt_pair import T
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ckpt_engine import Manifest
from rl_ckpt_engine.engines.base.receive_buffer import Bucket, ReceiveBuffer
from rl_ckpt_engine.payload.block_stream import Deadline, emit
from rl_ckpt_engine.payload.manifest import ALIGN
from rl_ckpt_engine.testing import assert_same, make_weights
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=12),
    bucket=st.integers(1, 400),
    stop=st.integers(0, 40),
)
@settings(max_examples=150, deadline=None)
def test_buckets_hold_every_missing_byte_once_and_what_was_verified_stays(
    sizes: list[int], bucket: int, stop: int
) -> None:
    weights = make_weights([(size,) for size in sizes], dtype="uint8", seed=len(sizes))

    async def run() -> None:
        payload, manifest = await written(weights)
        staging = ReceiveBuffer(bucket)
        moved = 0

        async def pull(buckets: list[Bucket], limit: int):
            nonlocal moved
            covered = [range(b.start, b.start + b.memory.nbytes) for b in buckets]
            assert all(one.stop <= two.start for one, two in pairwise(covered))
            for b in buckets:
                assert b.memory.nbytes <= bucket
                if limit == 0:
                    raise WeightSyncError("broke off")
                limit -= 1
                b.memory[:] = payload[b.start : b.start + b.memory.nbytes]
                moved += b.memory.nbytes
                yield

        try:
            await staging.fill(manifest, lambda buckets: pull(buckets, stop), Deadline(T, "Receiving", "x"))
        except WeightSyncError:
            kept = sum(e.nbytes for e in staging._held.values())
            before, moved = moved, 0
            assert kept <= before
            got = await staging.fill(manifest, lambda buckets: pull(buckets, -1), Deadline(T, "Receiving", "x"))
            assert moved <= manifest.payload_nbytes - kept
            assert_same(got, weights)
        else:
            assert manifest.tensor_nbytes <= moved <= manifest.payload_nbytes

    asyncio.run(run())


@pytest.mark.parametrize("nbytes", [1, 4_000, 1 << 20, (64 << 20) + 1])
def test_the_memory_of_a_buffer_is_aligned_like_the_payload(nbytes: int) -> None:
    memory = ReceiveBuffer(1 << 20).reserve(nbytes)
    assert memory.nbytes == nbytes
    assert memory.ctypes.data % ALIGN == 0
    memory[:] = 1


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=12),
    changed=st.sets(st.integers(0, 11)),
    unexpected=st.sets(st.integers(0, 11)),
    bucket=st.integers(1, 400),
    stop=st.integers(0, 40),
)
@settings(max_examples=150, deadline=None)
def test_what_was_prefetched_and_is_still_right_is_not_pulled(
    sizes: list[int], changed: set[int], unexpected: set[int], bucket: int, stop: int
) -> None:
    """Tensors in `changed` change after the prefetch, which ends after `stop` buckets."""
    early = make_weights([(size,) for size in sizes], dtype="uint8", seed=1)
    late = make_weights([(size,) for size in sizes], dtype="uint8", seed=2)
    final = [late[number] if number in changed else weight for number, weight in enumerate(early)]

    async def run() -> None:
        payload, manifest = await written(final)
        old_payload, old_manifest = await written(early)
        staging, pulled, filled, wanted = ReceiveBuffer(bucket), 0, 0, 0

        async def pull(source: bytearray, buckets: Sequence[Bucket], limit: int) -> AsyncGenerator[None]:
            nonlocal pulled, filled, wanted
            wanted = len(buckets)
            for b in buckets[:limit]:
                filled += 1
                b.memory[:] = source[b.start : b.start + b.memory.nbytes]
                pulled += b.memory.nbytes
                yield

        expected = [entry for number, entry in enumerate(old_manifest.tensors) if number not in unexpected]
        await staging.prefetch(
            expected,
            manifest.payload_nbytes,
            lambda buckets: pull(old_payload, buckets, stop),
            Deadline(T, "Prefetching", "x"),
        )
        early_bytes, whole, pulled = pulled, filled == wanted, 0
        got = await staging.fill(
            manifest, lambda buckets: pull(payload, buckets, len(buckets)), Deadline(T, "Receiving", "x")
        )
        assert_same(got, final)
        assert staging.prefetched_nbytes <= early_bytes
        assert manifest.tensor_nbytes - staging.prefetched_nbytes <= pulled
        if whole:
            right = [e for e in expected if e in manifest.tensors and e.nbytes]
            assert staging.prefetched_nbytes == sum(entry.nbytes for entry in right)

    asyncio.run(run())


async def written(weights: Sequence[WeightTensor]) -> tuple[bytearray, Manifest]:
    """The payload of these tensors and its manifest."""

    class Memory:
        unordered = True

        def __init__(self) -> None:
            self.payload = bytearray(20_000)

        def start(self, weight: WeightTensor, offset: int) -> bool:
            return True

        def write(self, offset: int, piece: memoryview) -> None:
            self.payload[offset : offset + len(piece)] = piece

    memory = Memory()
    entries = await emit(weights, memory, Deadline(T, "Sending", "x"))
    manifest = Manifest.new(entries, version=1, engine="x", kind="full", sender=b"", placement=b"")
    return memory.payload, manifest
