"""Casts equal torch's, and the sink receives the cast tensors."""

from __future__ import annotations

import asyncio
import tracemalloc

import numpy as np
import pytest
import torch
from ckpt_fakes import Sink, Source

from rl_ckpt_engine import CheckpointEngineManager, ReceiverEndpoint, SenderEndpoint
from rl_ckpt_engine.endpoints.cast_dtype import cast
from rl_ckpt_engine.engines.one_host.shm import ShmEngine
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import ConfigError

pytestmark = pytest.mark.numeric

TORCH = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def weight(dtype: str, data: np.ndarray) -> WeightTensor:
    return WeightTensor("w", dtype, (data.size,), data.view(np.uint8))


def test_bfloat16_by_hand() -> None:
    bits = {
        0x3F800000: 0x3F80,  # 1
        0x3F808000: 0x3F80,  # a tie rounds to the even neighbor: down
        0x3F818000: 0x3F82,  # a tie rounds to the even neighbor: up
        0x3F808001: 0x3F81,  # just above a tie
        0x7F7FFFFF: 0x7F80,  # the largest float32 overflows
        0xFF800000: 0xFF80,  # minus infinity
        0x7F800001: 0x7FC0,  # NaN, whose payload would round to infinity
        0x00000001: 0x0000,  # the smallest subnormal
    }
    data = np.array(list(bits), np.uint32)
    assert cast(weight("float32", data), "bfloat16").data.view(np.uint16).tolist() == list(bits.values())


def test_intermediate_results_fit_into_the_cache_of_a_core() -> None:
    """Else each of the operations of a cast waits for memory."""
    given = weight("float32", np.zeros(1 << 20, np.float32))
    tracemalloc.start()
    try:
        made = cast(given, "bfloat16")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - made.nbytes < 1 << 20


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_float64_is_rounded_as_torch_rounds_it(target: str) -> None:
    """By way of float32, in which these are ties."""
    beside = np.array([1 + 2**-bit + sign * 2**-40 for bit in (8, 11) for sign in (1, -1)] * 16)
    want = torch.from_numpy(beside).to(TORCH[target]).view(torch.int16)
    assert cast(weight("float64", beside), target).data.view(np.int16).tolist() == want.tolist()


@pytest.mark.parametrize("target", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("source", sorted(TORCH))
def test_any_bits_are_cast_as_torch_casts_them(source: str, target: str) -> None:
    size = 300_000  # more than one block
    raw = np.frombuffer(np.random.default_rng(1).bytes(size * TORCH[source].itemsize), np.uint8)
    got = cast(WeightTensor("w", source, (size,), raw), target)
    assert (got.dtype, got.shape) == (target, (size,))
    want = torch.frombuffer(bytearray(raw), dtype=TORCH[source]).to(torch.float32).to(TORCH[target])
    there = torch.frombuffer(bytearray(got.data), dtype=TORCH[target])
    assert torch.equal(there.isnan(), want.isnan())
    assert torch.equal(there[~there.isnan()], want[~want.isnan()])


def test_integers_and_empty_tensors_pass() -> None:
    steps = weight("int64", np.arange(3))
    assert cast(steps, "bfloat16") is steps
    empty = cast(WeightTensor("e", "float32", (0, 4), np.empty(0, np.uint8)), "bfloat16")
    assert (empty.dtype, empty.shape, empty.nbytes) == ("bfloat16", (0, 4), 0)


def test_master_weights_arrive_as_bfloat16() -> None:
    master = WeightTensor("w", "float32", (2,), np.array([1.0, -2.5], np.float32).view(np.uint8))
    sink = Sink([WeightTensor("w", "bfloat16", (2,), np.zeros(4, np.uint8))])
    sender = SenderEndpoint(ShmEngine(), Source([master]), dtype="bfloat16")
    manager = CheckpointEngineManager(sender, [ReceiverEndpoint(ShmEngine(), sink, name="r0")])
    report = asyncio.run(manager.update_weights(1))
    assert report.num_bytes == 4
    assert sink.loaded["w"] == np.array([0x3F80, 0xC020], np.uint16).tobytes()


def test_a_type_that_nothing_can_be_cast_to_is_refused() -> None:
    with pytest.raises(ConfigError, match="'int8'; use one of float32, float16, bfloat16"):
        SenderEndpoint(ShmEngine(), Source([]), dtype="int8")
