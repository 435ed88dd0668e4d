"""Engine `ray` in a local cluster, within one process and between processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from rl_ckpt_engine import CheckpointEngine, CheckpointEngineConfig, CheckpointEngineRegistry, Manifest
from rl_ckpt_engine.testing import EngineConformance, assert_same, make_weights
from rl_protocol.errors import ConfigError, WeightSyncError

ray: Any = pytest.importorskip("ray")
SHAPES = [(100_000, 3), (), (0,), (33,)]
T = 120.0


def make() -> CheckpointEngine:
    """Create the engine with small buckets, so that tensors span several objects."""
    return CheckpointEngineRegistry().create("ray", CheckpointEngineConfig(bucket_mb=0.3))


def test_outside_a_cluster_the_engine_says_what_to_do() -> None:
    engine = make()
    with pytest.raises(ConfigError, match=r"call ray\.init\(\)"):
        engine.prepare()
    with pytest.raises(ConfigError, match=r"call ray\.init\(\)"):
        asyncio.run(engine.send_weights(make_weights(SHAPES, seed=1), 1, timeout_s=T))
    engine.close()
    assert not ray.is_initialized(), "Ray would start a cluster of its own"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        ray.init(
            address="local", num_cpus=1, include_dashboard=False, object_store_memory=300 << 20, log_to_driver=False
        )
        try:
            yield
        finally:
            ray.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
class TestRay(EngineConformance):
    def make_engine(self) -> CheckpointEngine:
        return make()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("nbytes", "shapes"), [(10, [(5,), (17,), (1,)]), (100, [(24,), (0,)])])
def test_padding_may_span_objects(nbytes: int, shapes: list[tuple[int, ...]]) -> None:
    config = CheckpointEngineConfig(bucket_mb=nbytes / (1 << 20))
    sender, receiver = (CheckpointEngineRegistry().create("ray", config) for _ in range(2))
    weights = make_weights(shapes, seed=2)
    manifest = asyncio.run(sender.send_weights(weights, 1, timeout_s=T))
    receiver.init_process_group(manifest.sender)
    assert_same(asyncio.run(receiver.receive_weights(manifest, timeout_s=T)), weights)
    sender.close()
    receiver.close()


def pid_of(actor: Any) -> int:
    return os.getpid()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_sender_whose_actor_was_killed_sends_the_next_version() -> None:
    sender, receiver = make(), make()
    weights = make_weights(SHAPES, seed=3)
    receiver.init_process_group(asyncio.run(sender.send_weights(weights, 1, timeout_s=T)).sender)
    sender.finalize(1)
    board = ray.get_actor(msgspec.msgpack.decode(sender.prepare())["board"], "rl-ckpt-engine")
    os.kill(ray.get(board.__ray_call__.remote(pid_of), timeout=T), signal.SIGKILL)
    manifest = asyncio.run(sender.send_weights(weights, 2, timeout_s=T))
    sender.finalize(2)
    assert_same(asyncio.run(receiver.receive_weights(manifest, timeout_s=T)), weights)
    sender.close()
    receiver.close()


class Sender:
    """A separate process that sends version 1."""

    def __init__(self) -> None:
        self.engine = make()

    def send(self) -> bytes:
        manifest = asyncio.run(self.engine.send_weights(make_weights(SHAPES, seed=1), 1, timeout_s=T))
        self.engine.finalize(1)
        return manifest.encode()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_weights_go_between_processes_until_the_sender_is_killed() -> None:
    sender = ray.remote(num_cpus=0)(Sender).remote()
    manifest = Manifest.decode(ray.get(sender.send.remote(), timeout=240))
    receiver = make()
    receiver.init_process_group(type(receiver).build_topology(manifest.sender, [receiver.prepare()]).receivers[0])
    got = asyncio.run(receiver.receive_weights(manifest, timeout_s=T))
    assert_same(got, make_weights(SHAPES, seed=1))
    ray.kill(sender)
    deadline = time.monotonic() + 60
    # until Ray notices the kill, receivers still get the complete version
    with pytest.raises(WeightSyncError, match=r"sender|Ray"):
        receive_late_until(manifest, deadline)
    assert_same(got, make_weights(SHAPES, seed=1))
    receiver.close()


def receive_late_until(manifest: Manifest, deadline: float) -> None:
    while time.monotonic() < deadline:
        receive_late(manifest)


def receive_late(manifest: Manifest) -> None:
    late = make()
    late.init_process_group(type(late).build_topology(manifest.sender, [late.prepare()]).receivers[0])
    try:
        assert_same(asyncio.run(late.receive_weights(manifest, timeout_s=T)), make_weights(SHAPES, seed=1))
    finally:
        late.close()
