"""Changes only: what is encoded, what it costs, and that the result is always that of sending everything."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
from ckpt_fakes import Sink, Source
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ckpt_engine import (
    CheckpointEngine,
    CheckpointEngineConfig,
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    Manifest,
    ReceiverEndpoint,
    SenderEndpoint,
)
from rl_ckpt_engine.delta import compare, decode, encode
from rl_ckpt_engine.engines.delta import DeltaEngine, DeltaPlacement, over
from rl_ckpt_engine.engines.disk import DiskEngine
from rl_ckpt_engine.engines.naive import NaiveEngine
from rl_ckpt_engine.engines.shm import ShmEngine
from rl_ckpt_engine.engines.tcp import TcpEngine
from rl_ckpt_engine.engines.torch_group import GlooEngine
from rl_ckpt_engine.testing import EngineConformance, assert_same, make_weights, refusal
from rl_protocol.errors import WeightSyncError
from rl_protocol.weights import WeightTensor

pytestmark = pytest.mark.numeric

T = 20.0


class TestDeltaOverShm(EngineConformance):
    def make_engine(self) -> CheckpointEngine:
        return CheckpointEngineRegistry().create("delta-shm")


class TestDeltaOverNaive(EngineConformance):
    def make_engine(self) -> CheckpointEngine:
        return over(NaiveEngine)()


class TestDeltaOverTcp(EngineConformance):
    def make_engine(self) -> CheckpointEngine:
        return over(TcpEngine)()


class TestDeltaOverGloo(EngineConformance):
    def make_engine(self) -> CheckpointEngine:
        return over(GlooEngine)()


class TestDeltaOverDisk(EngineConformance):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def make_engine(self) -> CheckpointEngine:
        return over(DiskEngine)(CheckpointEngineConfig(directory=str(self.directory)))


def test_the_share_of_what_changed_counts_elements_however_they_travel() -> None:
    few, all_, none, new = (np.arange(n, dtype=np.uint32) for n in (100, 50, 40, 10))
    engine = CheckpointEngineRegistry().create("delta-shm")
    assert isinstance(engine, DeltaEngine)

    def share(version: int, *tensors: np.ndarray) -> float:
        weights = [WeightTensor(f"w{i}", "float32", (t.size,), t.view(np.uint8)) for i, t in enumerate(tensors)]
        asyncio.run(engine.send_weights(weights, version, timeout_s=T))
        return engine.changed_share

    assert share(1, few, all_, none) == 1.0
    engine.finalize(1)
    changed = few.copy()
    changed[::10] += 1
    assert share(2, changed, all_ + 1, none) == (10 + 50) / 190
    engine.abort()
    assert share(2, few, all_, none) == 0.0
    engine.finalize(2)
    assert share(3, changed, all_, none, new) == (10 + 10) / 200
    engine.close()


# ----------------------------------------------------------------------------------------------------------------- codec


@given(
    itemsize=st.sampled_from([1, 2, 4, 8]),
    count=st.integers(1, 400),
    flips=st.dictionaries(st.integers(0, 399), st.integers(1, 255), max_size=40),
    gap=st.sampled_from([0, 300, 70_000]),
)
@settings(max_examples=100, deadline=None)
def test_a_change_is_what_differs_and_applying_it_twice_changes_nothing(
    itemsize: int, count: int, flips: dict[int, int], gap: int
) -> None:
    old = np.arange((count + gap) * itemsize, dtype=np.uint8)
    new = old.copy()
    for at, bit in flips.items():
        if at < count:
            new[(at + (gap if at % 2 else 0)) * itemsize] ^= bit
    change = compare(old, new, itemsize)
    differing = sorted(at + (gap if at % 2 else 0) for at in flips if at < count)
    assert change.positions.tolist() == differing
    if not differing:
        return
    again = decode(encode(change), itemsize, count + gap)
    assert again.positions.tolist() == differing
    data = old.copy()
    undo = again.apply(data)
    assert np.array_equal(data, new)
    again.apply(data)
    assert np.array_equal(data, new)
    undo.apply(data)
    assert np.array_equal(data, old)


def test_blobs_that_are_no_change_of_the_tensor_are_refused() -> None:
    blob = encode(compare(np.zeros(40, np.uint8), np.arange(40, dtype=np.uint8), 4))
    for data, itemsize, count in [
        (blob[:5], 4, 10),
        (blob, 2, 20),
        (blob, 4, 9),
        (blob[:-3], 4, 10),
        (blob[:10] + bytes(20), 4, 10),
    ]:
        with pytest.raises(WeightSyncError, match="change"):
            decode(data, itemsize, count)
    forged = bytearray(blob)
    forged[2] = 3  # fewer elements than there are
    with pytest.raises(WeightSyncError, match="change"):
        decode(bytes(forged), 4, 10)


@pytest.mark.parametrize("share", [0.003, 0.01, 0.03])
def test_a_change_costs_at_most_its_positions_and_values(share: float) -> None:
    draw = np.random.default_rng(3)
    old = draw.integers(0, 2**16, 1_000_000, dtype=np.uint16)
    new = old.copy()
    at = draw.random(old.size) < share
    new[at] += draw.choice(np.array([1, 65535], np.uint16), int(at.sum()))
    blob = encode(compare(old.view(np.uint8), new.view(np.uint8), 2))
    ideal = int(at.sum()) * 4  # a 16-bit gap and a 16-bit value each
    assert len(blob) <= 1.0 * ideal
    assert len(blob) <= 0.10 * new.nbytes


# ---------------------------------------------------------------------------------------------------------------- engine

SHAPES = [(200, 50), (), (0,), (33,), (64, 64)]


def stepped(weights: list[WeightTensor], share: float, seed: int) -> list[WeightTensor]:
    """Some elements of some tensors changed."""
    draw = np.random.default_rng(seed)
    out = []
    for weight in weights:
        data = weight.data.copy()
        words = data.view(np.uint16)
        at = draw.random(words.size) < share
        words[at] ^= draw.integers(1, 2**16, int(at.sum()), dtype=np.uint16)
        out.append(WeightTensor(weight.name, weight.dtype, weight.shape, data))
    return out


def ends(engine: type[CheckpointEngine] = ShmEngine) -> tuple[CheckpointEngine, CheckpointEngine]:
    sender, receiver = over(engine)(), over(engine)()
    receiver.init_process_group(sender.prepare())
    return sender, receiver


def send(sender: CheckpointEngine, weights: list[WeightTensor], version: int) -> Manifest:
    return Manifest.decode(asyncio.run(sender.send_weights(weights, version, timeout_s=T)).encode())


def receive(receiver: CheckpointEngine, manifest: Manifest) -> list[WeightTensor]:
    return asyncio.run(receiver.receive_weights(manifest, timeout_s=T))


def carried(manifest: Manifest) -> int:
    """Bytes of the blobs."""
    return Manifest.decode(msgspec.msgpack.decode(manifest.placement, type=DeltaPlacement).carrier).tensor_nbytes


def test_two_hundred_steps_are_bit_equal_to_full_syncs() -> None:
    sender, receiver = ends()
    weights = make_weights(SHAPES, dtype="bfloat16", seed=0)
    full = sum(w.nbytes for w in weights)
    for version in range(200):
        manifest = send(sender, weights, version)
        assert_same(receive(receiver, manifest), weights)
        sender.finalize(version)
        if version:
            assert carried(manifest) <= 0.15 * full, "a few bytes per blob, and 6 % or less"
        weights = stepped(weights, 0.03 * (version % 3) / 2, version)
    sender.close()
    receiver.close()


def test_dense_tensors_go_whole_and_unchanged_ones_not_at_all() -> None:
    sender, receiver = ends()
    first = make_weights([(1000,), (1000,)], dtype="bfloat16", seed=1)
    receive(receiver, send(sender, first, 1))
    sender.finalize(1)
    dense = make_weights([(1000,), (1000,)], dtype="bfloat16", seed=2)
    mixed = [first[0], dense[1]]
    manifest = send(sender, mixed, 2)
    assert carried(manifest) == 2000
    assert_same(receive(receiver, manifest), mixed)
    sender.finalize(2)
    manifest = send(sender, mixed, 3)
    assert carried(manifest) == 0
    assert_same(receive(receiver, manifest), mixed)


def test_the_baseline_moves_with_finalize_alone() -> None:
    sender, receiver = ends()
    weights = make_weights(SHAPES, dtype="bfloat16", seed=1)
    receive(receiver, send(sender, weights, 1))
    sender.finalize(1)
    other = stepped(weights, 0.02, 5)
    manifest = send(sender, other, 2)
    assert_same(receive(receiver, manifest), other)
    sender.abort()  # others failed: version 2 is given up although it was received here
    third = stepped(weights, 0.02, 6)
    assert_same(receive(receiver, send(sender, third, 2)), third)
    sender.finalize(2)
    fourth = stepped(third, 0.02, 7)
    assert_same(receive(receiver, send(sender, fourth, 3)), fourth)


def test_a_damaged_change_leaves_the_copy_as_it_was() -> None:
    sender, receiver = ends(NaiveEngine)
    weights = make_weights(SHAPES, dtype="bfloat16", seed=1)
    receive(receiver, send(sender, weights, 1))
    sender.finalize(1)
    other = stepped(weights, 0.02, 5)
    manifest = send(sender, other, 2)
    wrong = msgspec.structs.replace(manifest.tensors[4], digest=bytes(16))
    forged = msgspec.structs.replace(manifest, tensors=(*manifest.tensors[:4], wrong)).sealed()
    assert "'w4' of version 2 arrived damaged" in refusal(lambda: receive(receiver, forged))
    assert_same(receive(receiver, manifest), other)


def test_who_lacks_the_baseline_is_refused_and_comes_in_with_a_full_version() -> None:
    weights = make_weights(SHAPES, dtype="bfloat16", seed=1)
    source = Source(weights)
    sinks = [Sink(weights) for _ in range(3)]
    sender = SenderEndpoint(over(TcpEngine)(), source)
    one, late, later = (ReceiverEndpoint(over(TcpEngine)(), sink, name=f"r{i}") for i, sink in enumerate(sinks))
    manager = CheckpointEngineManager(sender, [one])

    async def run() -> None:
        for version in (1, 2):
            source.weights = stepped(source.weights, 0.02, version)
            await manager.update_weights(version)
        stranger = over(TcpEngine)()
        data = await sender.send(3, T)
        stranger.init_process_group(Manifest.decode(data).sender)
        with pytest.raises(WeightSyncError, match="does not have; it must be brought in"):
            await stranger.receive_weights(Manifest.decode(data), timeout_s=T)
        stranger.close()
        await sender.abort()
        await manager.add_receiver(late)
        source.weights = stepped(source.weights, 0.02, 9)
        assert (await manager.update_weights(4)).receivers == ("r0", "r1")
        sender.close()
        await manager.add_receiver(later)

    asyncio.run(run())
    want = {w.name: w.data.tobytes() for w in source.weights}
    assert [sink.loaded == want for sink in sinks] == [True, True, True]
    for end in (one, late, later):
        end.close()


def test_a_source_that_changes_before_the_commit_costs_the_baseline_alone() -> None:
    sender, receiver = ends(NaiveEngine)
    memory = np.zeros(100, np.uint8)
    receive(receiver, send(sender, [WeightTensor("w", "uint8", (100,), memory)], 1))
    memory[:] = 1
    sender.finalize(1)
    manifest = send(sender, [WeightTensor("w", "uint8", (100,), memory)], 2)
    assert carried(manifest) == 100, "everything goes whole"
    assert receive(receiver, manifest)[0].data.tolist() == [1] * 100
