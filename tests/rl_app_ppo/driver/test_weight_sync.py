"""The weight-sync endpoints and their remote handles: encoded calls in one process."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from rich.console import Console

from rl_app_ppo.checks.weight_engine import check_sync
from rl_app_ppo.cli.main import main
from rl_app_ppo.driver.weight_sync import make_sync, measured
from rl_app_ppo.outputs.console import Screen
from rl_app_ppo.worker.messages import BuildCall
from rl_app_ppo.worker.weight_endpoints import make_engine, require_admission
from rl_ckpt_engine import (
    CheckpointEngineConfig,
    CheckpointEngineManager,
    FollowerEndpoint,
    PluginPolicy,
    ReceiverEndpoint,
    SenderEndpoint,
    remote,
)
from rl_ckpt_engine.endpoints.operations import METHODS, Endpoint
from rl_ckpt_engine.sync import progress
from rl_protocol import ConfigError, WeightSyncError, WeightTensor, WorkerError
from rl_protocol.ports import WeightCapabilities
from rl_protocol.support.plugins import ALLOW_FILE

NONE = PluginPolicy()


class Policy:
    """1000 bfloat16 elements, as their bits; each step changes the first ten."""

    capabilities = WeightCapabilities()

    def __init__(self) -> None:
        self.bits = np.arange(1000, dtype=np.uint16)

    def step(self) -> None:
        self.bits = self.bits.copy()
        self.bits[:10] += 1

    def named_weights(self) -> Iterator[WeightTensor]:
        yield WeightTensor("w", "bfloat16", (1000,), self.bits.view(np.uint8))


class Rollout:
    capabilities = WeightCapabilities()
    weight_version = 0
    bits: np.ndarray

    def load_weights(self, weights, version: int) -> None:
        (weight,) = weights
        self.bits, self.weight_version = weight.data.view(np.uint16).copy(), version


class Worker:
    """A WorkerHandle that answers encoded calls in this process."""

    def __init__(self, name: str, end: Endpoint) -> None:
        self.name = name
        self.bytes_moved = 0
        self.end = end
        self.dead = False

    async def call(self, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        if self.dead:
            raise WorkerError(f"Worker {self.name} died during {method}.")
        self.bytes_moved += len(payload)
        return await self.end.handle(method.removeprefix(METHODS), payload)


class Parts:
    """A policy, its sender, three rollout workers, and a manager that starts with two of them."""

    def __init__(self, backend: str) -> None:
        self.config = CheckpointEngineConfig(backend=backend, timeout_s=20.0)
        self.policy, self.rollouts = Policy(), [Rollout() for _ in range(3)]
        self.ends: list = [SenderEndpoint(make_engine(self.config, NONE), self.policy)]
        self.ends += [ReceiverEndpoint(make_engine(self.config, NONE), sink) for sink in self.rollouts]
        self.actor = Worker("actor", self.ends[0])
        self.workers = [Worker(f"rollout-{i}", end) for i, end in enumerate(self.ends[1:])]
        self.manager = make_sync(self.config, NONE, [self.actor], self.workers[:2])

    def equal(self, *workers: int) -> bool:
        return all(np.array_equal(self.rollouts[i].bits, self.policy.bits) for i in workers)

    def close(self) -> None:
        for end in self.ends:
            end.close()


@pytest.fixture
def parts(request):
    made = Parts(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("parts", ["shm", "tcp", "gloo", "delta-shm", "delta-gloo"], indirect=True)
def test_the_handles_carry_every_engine(parts):
    async def syncs() -> None:
        for version in (1, 2):
            parts.policy.step()
            report = await parts.manager.update_weights(version)
            assert (report.version, report.num_bytes) == (version, 2000)
            assert report.receivers == ("rollout-0", "rollout-1")
            assert parts.equal(0, 1)

    asyncio.run(syncs())


@pytest.mark.parametrize("parts", ["shm", "tcp", "gloo", "delta-shm", "delta-gloo"], indirect=True)
def test_the_handles_bring_a_late_joiner_in(parts):
    async def syncs() -> None:
        for version in (1, 2):  # the second is a change, which a late joiner can't apply
            parts.policy.step()
            await parts.manager.update_weights(version)
        await parts.manager.add_receiver(remote(ReceiverEndpoint, parts.workers[2]))

    asyncio.run(syncs())
    assert parts.equal(0, 1, 2)
    assert parts.rollouts[2].weight_version == 2


@pytest.mark.parametrize("parts", ["delta-shm"], indirect=True)
def test_the_metrics_of_a_step_say_how_much_changed_and_what_it_weighs(parts):
    seen: list[tuple[int, dict[str, float]]] = []
    record = measured(parts.manager, lambda step, metrics: seen.append((step, dict(metrics))))
    record(0, {"val": 0.5})
    for version in (1, 2):
        parts.policy.step()
        asyncio.run(parts.manager.update_weights(version))
        record(version, {"weight_sync/version": float(version)})
    assert seen[0] == (0, {"val": 0.5})
    (_, first), (_, second) = seen[1:]
    assert first["weight_sync/changed_share"] == 1.0
    assert first["weight_sync/delta_bytes"] == first["weight_sync/bytes"] == 2000
    assert second["weight_sync/changed_share"] == 0.01
    # ten 1-byte gaps, ten 2-byte values, and the headers
    assert 0 < second["weight_sync/delta_bytes"] < 60
    assert {"weight_sync/receive_seconds", "weight_sync/gib_per_second", "weight_sync/quarantined"} <= second.keys()


@pytest.mark.parametrize("parts", ["shm"], indirect=True)
def test_other_engines_measure_no_changes(parts):
    parts.policy.step()
    asyncio.run(parts.manager.update_weights(1))
    assert not {"weight_sync/changed_share", "weight_sync/delta_bytes"} & parts.manager.metrics.keys()


@pytest.mark.parametrize("parts", ["shm"], indirect=True)
def test_a_sync_that_takes_long_shows_where_it_is(parts, monkeypatch):
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(progress, "_EVERY_S", 0.01)
    bars: list[tuple[str, int, int]] = []
    shown = asyncio.Event()
    screen = Screen(Console(file=io.StringIO()))

    def draw(*bar) -> None:
        bars.append(bar)
        if bar == ("weights 1: receive", 1, 3):
            shown.set()

    monkeypatch.setattr(screen, "bar", draw)
    manager = make_sync(parts.config, NONE, [parts.actor], parts.workers[:1], screen.weights)
    answering = parts.workers[0].call

    async def slow(method: str, payload: bytes, *, timeout_s: float) -> bytes:
        if method == "weights.receive":
            await shown.wait()
        return await answering(method, payload, timeout_s=timeout_s)

    parts.workers[0].call = slow
    asyncio.run(manager.update_weights(1))
    assert shown.is_set()
    assert {total for *_, total in bars} == {3}


@pytest.mark.parametrize("parts", ["tcp", "gloo"], indirect=True)
def test_a_dead_worker_is_named_and_the_others_go_on(parts):
    parts.policy.step()
    asyncio.run(parts.manager.update_weights(1))
    parts.workers[0].dead = True
    parts.policy.step()
    assert asyncio.run(parts.manager.update_weights(2)).receivers == ("rollout-1",)
    assert parts.equal(1)
    assert "Worker rollout-0 died" in parts.manager.quarantined["rollout-0"]


@pytest.mark.parametrize("parts", ["shm"], indirect=True)
def test_a_replica_that_missed_a_version_generates_nothing_until_it_has_caught_up(parts):
    parts.policy.step()
    asyncio.run(parts.manager.update_weights(1))
    failing = parts.ends[1]
    require_admission(failing, "rollout")
    parts.rollouts[0].load_weights = lambda weights, version: (_ for _ in ()).throw(WeightSyncError("out of memory"))
    parts.policy.step()
    assert asyncio.run(parts.manager.update_weights(2)).receivers == ("rollout-1",)
    with pytest.raises(
        WorkerError,
        match=r"'rollout' was called on a replica whose last weight sync.* failed.*after a successful synchronization",
    ):
        require_admission(failing, "rollout")
    require_admission(parts.ends[2], "rollout")
    del parts.rollouts[0].load_weights
    asyncio.run(parts.manager.add_receiver(remote(ReceiverEndpoint, parts.workers[0])))
    require_admission(failing, "rollout")
    assert parts.equal(0, 1)


@pytest.mark.parametrize("backend", ["shm", "delta-shm"])
def test_weights_are_cast_to_what_the_rollout_computes_in(backend):
    class Trained:
        capabilities = WeightCapabilities()

        def named_weights(self):
            numbers = np.array([1.0, 1.00390625, -3.0e-3], np.float32)
            yield WeightTensor("w", "float32", (3,), numbers.view(np.uint8))
            yield WeightTensor("position", "int64", (3,), np.arange(3).view(np.uint8))

    class Taken:
        capabilities = WeightCapabilities()
        weight_version = 0

        def load_weights(self, weights, version):
            self.weights, self.weight_version = {w.name: (w.dtype, w.data.copy()) for w in weights}, version

    config, sink = CheckpointEngineConfig(backend=backend), Taken()
    sender = SenderEndpoint(make_engine(config, NONE), Trained(), dtype="bfloat16")
    receiver = ReceiverEndpoint(make_engine(config, NONE), sink)
    asyncio.run(CheckpointEngineManager(sender, [receiver], config).update_weights(1))
    (w_type, w), (position_type, position) = sink.weights["w"], sink.weights["position"]
    assert (w_type, position_type) == ("bfloat16", "int64")
    # 1 + 2**-8 is halfway between 1 and 1 + 2**-7 and rounds to the even one; -3e-3 is 0xbb449ba6
    # in float32.
    assert w.view(np.uint16).tolist() == [0x3F80, 0x3F80, 0xBB45]
    assert position.view(np.int64).tolist() == [0, 1, 2]
    sender.close()
    receiver.close()


@pytest.mark.parametrize("failing", [False, True])
def test_the_other_ranks_read_their_parts_while_the_first_sends(failing: bool):
    """Each rank waits in the iterator of its source until all ranks read."""
    everyone, read = asyncio.Event(), []

    class Rank(Worker):
        async def call(self, method: str, payload: bytes, *, timeout_s: float) -> bytes:
            if method in ("weights.send", "weights.follow"):
                read.append(self.name)
                if len(read) == 3:
                    everyone.set()
                await everyone.wait()
                if failing and self.name == "actor-2":
                    raise WorkerError("Worker actor-2 lost its device.")
            return await super().call(method, payload, timeout_s=timeout_s)

    parts = Parts("shm")
    ranks = [Rank("actor", parts.ends[0]), *(Rank(f"actor-{i}", FollowerEndpoint(parts.policy)) for i in (1, 2))]
    manager = make_sync(parts.config, NONE, ranks, parts.workers[:2])
    if failing:
        with pytest.raises(WeightSyncError, match="send: the sender failed: Worker actor-2 lost its device"):
            asyncio.run(manager.update_weights(1))
    else:
        assert asyncio.run(manager.update_weights(1)).version == 1
        assert parts.equal(0, 1)
    assert sorted(read) == ["actor", "actor-1", "actor-2"]
    parts.close()


def test_workers_are_told_what_the_driver_may_load():
    policy = PluginPolicy(allow_unsafe_plugins=True)
    call = BuildCall(config="", model_path="", plane=b"", plugins=policy)
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=BuildCall).plugins
    assert told == policy
    config = CheckpointEngineConfig(backend="shm", checkpoint_manager_class="json:Other")
    with pytest.raises(ConfigError, match="no attribute 'Other'"):
        check_sync(config, told)
    with pytest.raises(ConfigError, match="allow_unsafe_plugins on the command line"):
        check_sync(config, NONE)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["checkpoint_engine.backend=carrier_pigeon"],
            "no checkpoint engine 'carrier_pigeon'; there are cuda_ipc, disk, gloo",
        ),
        (["checkpoint_engine.backend=delta-pigeon"], "no checkpoint engine 'pigeon'"),
        (["placement=separate", "checkpoint_engine.backend=naive"], "works within one process"),
        (["placement=separate", "checkpoint_engine.backend=delta-naive"], "works within one process"),
        (["checkpoint_engine.backend=disk"], "set checkpoint_engine.directory"),
        (["checkpoint_engine.backend=tcp", "checkpoint_engine.listen=10.0.0.1"], "needs a key"),
        (["checkpoint_engine.checkpoint_manager_class=missing"], "No installed package offers 'missing'"),
        (["checkpoint_engine.checkpoint_manager_class=os:path"], "allow_unsafe_plugins on the command line"),
        (["--allow-unsafe-plugins", "checkpoint_engine.checkpoint_manager_class=os:path"], "not a subclass of"),
    ],
)
def test_what_can_not_synchronise_is_refused_before_a_process_starts(overrides, message, capsys, monkeypatch, tmp_path):
    monkeypatch.delenv(ALLOW_FILE, raising=False)
    assert main([*overrides, f"trainer.output_dir={tmp_path}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert re.search(re.escape(message), err), err
    assert not list(tmp_path.iterdir())


def test_an_allow_list_that_cannot_be_read_is_refused(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv(ALLOW_FILE, str(tmp_path / "missing.toml"))
    assert main([f"trainer.output_dir={tmp_path}"]) == 2
    assert "missing.toml can't be read" in capsys.readouterr().err
