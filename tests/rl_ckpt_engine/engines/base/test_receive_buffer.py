"""ReceiveBuffer: buckets cover the missing tensors; verified tensors are kept."""

from __future__ import annotations

import asyncio
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

    class Memory:
        unordered = True

        def __init__(self) -> None:
            self.payload = bytearray(20_000)

        def start(self, weight: WeightTensor, offset: int) -> bool:
            return True

        def write(self, offset: int, piece: memoryview) -> None:
            self.payload[offset : offset + len(piece)] = piece

    async def run() -> None:
        memory = Memory()
        entries = await emit(weights, memory, Deadline(T, "Sending", "x"))
        manifest = Manifest(
            version=1,
            sync_id=bytes(16),
            engine="x",
            tensors=entries,
            payload_nbytes=max(e.end for e in entries),
            sender=b"",
            placement=b"",
        ).sealed()
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
                b.memory[:] = memory.payload[b.start : b.start + b.memory.nbytes]
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
