"""Delta engines: the result always equals that of a full sync."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from ckpt_fakes import Sink, Source

from rl_ckpt_engine import (
    CheckpointEngine,
    CheckpointEngineConfig,
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    Manifest,
    ReceiverEndpoint,
    SenderEndpoint,
)
from rl_ckpt_engine.engines.delta.delta_engine import DeltaEngine, DeltaPlacement, delta_over
from rl_ckpt_engine.engines.network.tcp import TcpEngine
from rl_ckpt_engine.engines.network.torch_group import GlooEngine
from rl_ckpt_engine.engines.one_host.naive import NaiveEngine
from rl_ckpt_engine.engines.one_host.shm import ShmEngine
from rl_ckpt_engine.engines.storage.disk import DiskEngine
from rl_ckpt_engine.testing import EngineConformance, assert_same, make_weights, refusal
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError

pytestmark = pytest.mark.numeric


T = 120.0


class TestDeltaOverShm(EngineConformance):
    def make_engine(self) -> CheckpointEngine:
        return CheckpointEngineRegistry().create("delta-shm")


class TestDeltaOverNaive(EngineConformance):
    def make_engine(self) -> CheckpointEngine:
        return delta_over(NaiveEngine)()


class TestDeltaOverTcp(EngineConformance):
    def make_engine(self) -> CheckpointEngine:
        return delta_over(TcpEngine)()


class TestDeltaOverGloo(EngineConformance):
    def make_engine(self) -> CheckpointEngine:
        return delta_over(GlooEngine)()


class TestDeltaOverDisk(EngineConformance):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def make_engine(self) -> CheckpointEngine:
        return delta_over(DiskEngine)(CheckpointEngineConfig(directory=str(self.directory)))


def test_the_share_of_what_changed_counts_elements_however_they_travel() -> None:
    few, all_, none, new = (np.arange(n, dtype=np.uint32) for n in (100, 50, 40, 10))
    engine = CheckpointEngineRegistry().create("delta-shm")
    assert isinstance(engine, DeltaEngine)

    def share(version: int, *tensors: np.ndarray) -> float:
        weights = [WeightTensor(f"w{i}", "float32", (t.size,), t.view(np.uint8)) for i, t in enumerate(tensors)]
        asyncio.run(engine.send_weights(weights, version, timeout_s=T))
        return engine.send_metrics()["changed_share"]

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


SHAPES = [(200, 50), (), (0,), (33,), (64, 64)]


def stepped(weights: list[WeightTensor], share: float, seed: int) -> list[WeightTensor]:
    """Return the weights with a random share of their elements changed."""
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
    sender, receiver = delta_over(engine)(), delta_over(engine)()
    receiver.init_process_group(sender.prepare())
    return sender, receiver


def send(sender: CheckpointEngine, weights: list[WeightTensor], version: int) -> Manifest:
    return Manifest.decode(asyncio.run(sender.send_weights(weights, version, timeout_s=T)).encode())


def receive(receiver: CheckpointEngine, manifest: Manifest) -> list[WeightTensor]:
    return asyncio.run(receiver.receive_weights(manifest, timeout_s=T))


def carried(manifest: Manifest) -> int:
    """Return the size of the blobs that were sent."""
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
    sender.abort()  # another receiver failed: version 2 is dropped although this one received it
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
    sender = SenderEndpoint(delta_over(TcpEngine)(), source)
    one, late, later = (ReceiverEndpoint(delta_over(TcpEngine)(), sink, name=f"r{i}") for i, sink in enumerate(sinks))
    manager = CheckpointEngineManager(sender, [one])

    async def run() -> None:
        for version in (1, 2):
            source.weights = stepped(source.weights, 0.02, version)
            await manager.update_weights(version)
        stranger = delta_over(TcpEngine)()
        data = (await sender.send(3, T)).manifest
        stranger.init_process_group(Manifest.decode(data).sender)
        with pytest.raises(WeightSyncError, match="does not have; it needs a full version"):
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


def test_the_folder_of_a_killed_republisher_is_removed(tmp_path: Path) -> None:
    """It holds all weights."""
    config = CheckpointEngineConfig(directory=str(tmp_path))
    code = """if True:
        import asyncio, os, signal, sys
        from rl_ckpt_engine import CheckpointEngineConfig
        from rl_ckpt_engine.engines.delta.delta_engine import delta_over
        from rl_ckpt_engine.engines.storage.disk import DiskEngine
        from rl_ckpt_engine.testing import make_weights
        engine = delta_over(DiskEngine)(CheckpointEngineConfig(directory=sys.argv[1]))
        asyncio.run(engine.send_weights(make_weights([(4, 3)]), 1, timeout_s=60))
        engine.finalize(1)
        asyncio.run(engine.republish(timeout_s=60))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob("kept-*")
    assert any(left.iterdir())
    engine = delta_over(DiskEngine)(config)
    send(engine, make_weights([(4, 3)]), 1)
    engine.finalize(1)
    asyncio.run(engine.republish(timeout_s=T))
    assert not left.exists()
    assert len(list(tmp_path.glob("kept-*"))) == 1
    engine.close()
    assert not list(tmp_path.glob("kept-*"))


def test_a_source_that_changes_before_the_commit_costs_the_baseline_alone() -> None:
    sender, receiver = ends(NaiveEngine)
    memory = np.zeros(100, np.uint8)
    receive(receiver, send(sender, [WeightTensor("w", "uint8", (100,), memory)], 1))
    memory[:] = 1
    sender.finalize(1)
    manifest = send(sender, [WeightTensor("w", "uint8", (100,), memory)], 2)
    assert carried(manifest) == 100, "everything goes whole"
    assert receive(receiver, manifest)[0].data.tolist() == [1] * 100
