"""Rollout workers that die are replaced: encoded calls and real engines in one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import numpy as np
import pytest

from rl_app_ppo.config.restart import RestartConfig
from rl_app_ppo.driver.replicas import Replica, ReplicaSync
from rl_app_ppo.driver.restart_policy import RestartLimitError, RestartPolicy
from rl_app_ppo.driver.weight_sync import make_sync
from rl_app_ppo.worker.weight_endpoints import make_engine, require_admission
from rl_ckpt_engine import (
    CheckpointEngineConfig,
    CheckpointEngineManager,
    PluginPolicy,
    ReceiverEndpoint,
    SenderEndpoint,
)
from rl_ckpt_engine.endpoints.operations import METHODS
from rl_protocol import RLError, WeightSyncError, WeightTensor, WorkerDiedError, WorkerError
from rl_protocol.ports import WeightCapabilities
from rl_rollout_vllm import EngineDiedError

NONE = PluginPolicy()
RESTARTS = 6


def policy() -> RestartPolicy:
    return RestartPolicy(RestartConfig(max_per_hour=RESTARTS, backoff_s=0.0))


class Policy:
    """100 numbers, all equal to the version."""

    capabilities = WeightCapabilities()
    version = 0

    def named_weights(self) -> Iterator[WeightTensor]:
        numbers = np.full(100, self.version, np.float32)
        yield WeightTensor("w", "float32", (100,), numbers.view(np.uint8))


class Rollout:
    capabilities = WeightCapabilities(sleeps=True, drops_weights=True)
    weight_version = 0
    held = 0.0
    asleep: tuple[str, ...] = ()
    level = 0

    async def sleep(self, level: int) -> int:
        self.level, self.asleep = level, ("weights", "kv_cache")
        return 400

    async def wake(self, part) -> None:
        self.asleep = tuple(one for one in self.asleep if part not in (one, None))

    def load_weights(self, weights, version: int) -> None:
        (weight,) = weights
        (self.held,) = set(weight.data.view(np.float32).tolist())
        self.weight_version = version


class Process:
    """A worker whose process, or the engine's, dies before it answers a call of the next method.

    `deaths` lists the methods, in order.
    """

    bytes_moved = 0

    def __init__(self, name: str, config: CheckpointEngineConfig) -> None:
        self.name = name
        self.process = self
        self.started = 0
        self.deaths: list[str] = []
        self.engine_dies = False
        self._config = config
        self._dead = False
        self._end: ReceiverEndpoint | None = None
        self._start()

    def _start(self) -> None:
        self.started += 1
        self._dead = False
        self.sink = Rollout()
        self._end = ReceiverEndpoint(make_engine(self._config, NONE), self.sink, name=self.name)

    async def restart(self) -> None:
        self.close()
        await asyncio.sleep(0)  # as a start takes time, others may run meanwhile
        self._start()

    async def call(self, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        if self.deaths and method == self.deaths[0]:
            self.deaths.pop(0)
            self._dead = True
        if self._dead and self.engine_dies:
            raise EngineDiedError("The process of the vLLM engine is gone.")
        if self._dead:
            raise WorkerDiedError(f"Worker {self.name} died during {method}: it was killed. Its log: x")
        if method.startswith(METHODS):
            return await self._end.handle(method.removeprefix(METHODS), payload)
        require_admission(self._end, method)
        return payload + f" by {self.started} with {self.sink.held:g}".encode()

    def close(self) -> None:
        assert self._end is not None
        self._end.close()


class Actor:
    """The worker that sends the weights."""

    name, bytes_moved = "actor", 0

    def __init__(self, end: SenderEndpoint) -> None:
        self.end = end

    async def call(self, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        return await self.end.handle(method.removeprefix(METHODS), payload)


class Run:
    """A policy, its replicas, and the manager between them."""

    def __init__(self, backend: str, replicas: int = 2) -> None:
        config = CheckpointEngineConfig(backend=backend, timeout_s=20.0)
        self.policy = Policy()
        self.sender = SenderEndpoint(make_engine(config, NONE), self.policy)
        self.processes = [Process(f"rollout-{i}", config) for i in range(replicas)]
        self.manager: CheckpointEngineManager = make_sync(config, NONE, [Actor(self.sender)], self.processes)
        self.said: list[str] = []
        self.replicas = [Replica(process, self.manager, policy(), self.said.append) for process in self.processes]
        self.sync = ReplicaSync(self.manager, self.replicas, whole=True)

    async def update(self, version: int) -> tuple[str, ...]:
        self.policy.version = version
        return (await self.sync.update_weights(version)).receivers

    async def generate(self) -> list[str]:
        return [(await replica.call("rollout", b"row", timeout_s=9)).decode() for replica in self.replicas]

    def close(self) -> None:
        for end in (self.sender, *self.processes):
            end.close()


@pytest.fixture
def run(request):
    backend, replicas = getattr(request, "param", ("shm", 2))
    made = Run(backend, replicas)
    yield made
    made.close()


@pytest.mark.parametrize(
    "run", [(b, 2) for b in ("shm", "tcp", "gloo", "delta-shm", "delta-gloo")], indirect=True, ids=lambda p: p[0]
)
def test_one_that_dies_while_it_generates_is_replaced_and_generates_with_the_weights_of_the_others(run):
    async def steps() -> None:
        await run.update(1)
        await run.update(2)  # with delta engines this is a change, which a new worker can't apply
        run.processes[0].deaths = ["rollout"]
        assert await run.generate() == ["row by 2 with 2", "row by 1 with 2"]
        assert not run.manager.quarantined
        assert await run.update(3) == ("rollout-1", "rollout-0")
        assert await run.generate() == ["row by 2 with 3", "row by 1 with 3"]
        assert run.manager.metrics["weight_sync/rejoined"] == 1

    asyncio.run(steps())


def test_a_sync_is_recorded_once_with_its_begin_also_if_it_was_repeated(run):
    recorded = []
    sync = ReplicaSync(run.manager, run.replicas, on_synced=lambda report, began: recorded.append((report, began)))

    async def steps() -> None:
        run.policy.version = 1
        for process in run.processes:
            process.deaths = ["weights.receive"]
        began = time.time()
        report = await sync.update_weights(1)
        assert [one for one, _ in recorded] == [report]
        assert began <= recorded[0][1] <= time.time()

    asyncio.run(steps())


def test_one_whose_engine_dies_is_replaced_with_its_engine(run, caplog):
    async def steps() -> None:
        await run.update(1)
        run.processes[0].engine_dies = True
        run.processes[0].deaths = ["rollout"]
        assert await run.generate() == ["row by 2 with 1", "row by 1 with 1"]
        run.processes[0].deaths = ["rollout"] * (RESTARTS + 1)
        with pytest.raises(RestartLimitError, match="The process of the vLLM engine is gone"):
            await run.generate()

    asyncio.run(steps())
    assert "Receiver rollout-0 is quarantined: The process of the vLLM engine is gone" in caplog.text


@pytest.mark.parametrize("phase", ["receive", "activate"])
def test_one_that_dies_in_a_sync_is_left_behind_and_replaced_when_it_is_needed(run, phase):
    async def steps() -> None:
        await run.update(1)
        run.processes[1].deaths = [f"weights.{phase}"]
        assert await run.update(2) == ("rollout-0",)
        assert "Worker rollout-1 died" in run.manager.quarantined["rollout-1"]
        assert await run.generate() == ["row by 1 with 2", "row by 2 with 2"]
        assert await run.update(3) == ("rollout-0", "rollout-1")

    asyncio.run(steps())


@pytest.mark.parametrize("run", [("shm", 1)], indirect=True)
@pytest.mark.parametrize("phase", ["receive", "activate"])
def test_a_version_that_the_only_replica_died_of_goes_to_the_one_in_its_place(run, phase):
    async def steps() -> None:
        run.processes[0].deaths = [f"weights.{phase}"]
        assert await run.update(1) == ("rollout-0",)
        assert await run.generate() == ["row by 2 with 1"]
        run.processes[0].deaths = [f"weights.{phase}"]
        assert await run.update(2) == ("rollout-0",)
        assert await run.generate() == ["row by 3 with 2"]
        run.processes[0].deaths = ["weights.receive"] * 2
        assert await run.update(3) == ("rollout-0",)
        assert await run.generate() == ["row by 5 with 3"]
        run.processes[0].deaths = ["weights.receive"] * (RESTARTS + 1)
        with pytest.raises(
            RestartLimitError, match="rollout-0 is lost and gets no new process: rollout-0 was restarted 6 times"
        ):
            await run.update(4)

    asyncio.run(steps())


def test_a_live_one_that_missed_a_version_is_replaced_too(run):
    async def steps() -> None:
        await run.update(1)
        run.processes[0].sink.load_weights = lambda weights, version: (_ for _ in ()).throw(WeightSyncError("too big"))
        assert await run.update(2) == ("rollout-1",)
        assert await run.generate() == ["row by 2 with 2", "row by 1 with 2"]

    asyncio.run(steps())


def test_restarts_are_counted_and_then_the_death_is_the_error(run, caplog):
    async def steps() -> None:
        await run.update(1)
        failing = run.processes[0]
        for _ in range(RESTARTS):  # a successful call is no reason for more
            failing.deaths = ["rollout"]
            await run.generate()
        assert failing.started == 1 + RESTARTS
        failing.deaths = ["rollout"]
        with pytest.raises(
            RestartLimitError, match=r"restart.max_per_hour=6 allows. Worker rollout-0 died during rollout"
        ):
            await run.generate()
        assert failing.started == 1 + RESTARTS
        assert await run.update(2) == ("rollout-1",)

    asyncio.run(steps())
    assert "Receiver rollout-0 is quarantined: Worker rollout-0 died during rollout" in caplog.text
    assert run.said[-1].startswith(
        "rollout worker rollout-0 is lost and gets a new process (restart 6 of at most 6 an hour, in 0 s): "
        "Worker rollout-0 died during rollout"
    )


def test_each_replica_has_its_own_restarts(run):
    async def steps() -> None:
        await run.update(1)
        for process in run.processes:
            process.deaths = ["rollout"] * RESTARTS
        assert await run.generate() == ["row by 7 with 1"] * 2

    asyncio.run(steps())


def test_one_that_dies_while_it_catches_up_is_replaced_again(run):
    async def steps() -> None:
        await run.update(1)
        run.processes[0].deaths = ["rollout", "weights.activate"]
        assert (await run.generate())[0] == "row by 3 with 1"

    asyncio.run(steps())


def test_calls_that_wait_while_it_dies_share_one_new_process(run):
    """Regression: each of them killed the process that another had just started."""

    async def steps() -> None:
        await run.update(1)
        process, replica = run.processes[0], run.replicas[0]
        process.deaths = ["rollout"]
        calls = [replica.call("rollout", b"%d" % i, timeout_s=9) for i in range(3)]
        assert await asyncio.gather(*calls) == [b"%d by 2 with 1" % i for i in range(3)]
        assert process.started == 2

    asyncio.run(steps())


def test_a_late_error_of_the_former_process_is_no_loss_of_the_new_one(run):
    async def steps() -> None:
        await run.update(1)
        process, replica, late = run.processes[0], run.replicas[0], asyncio.Event()

        async def call(method: str, payload: bytes, *, timeout_s: float) -> bytes:
            if payload == b"late" and process.started == 1:
                await late.wait()
                raise WorkerDiedError("Worker rollout-0 died during rollout: it was killed.")
            return await type(process).call(process, method, payload, timeout_s=timeout_s)

        process.call = call
        waiting = asyncio.create_task(replica.call("rollout", b"late", timeout_s=9))
        await asyncio.sleep(0)
        process.deaths = ["rollout"]
        assert await replica.call("rollout", b"row", timeout_s=9) == b"row by 2 with 1"
        late.set()
        assert await waiting == b"late by 2 with 1"
        assert (process.started, replica.lost) == (2, False)

    asyncio.run(steps())


def test_without_a_sync_the_new_process_has_the_initial_weights():
    process = Process("rollout-0", CheckpointEngineConfig())
    process.deaths = ["rollout"]
    replica = Replica(process, None, policy(), [].append)
    assert asyncio.run(replica.call("rollout", b"row", timeout_s=9)) == b"row by 2 with 0"
    process.close()


NO_RAY = "Ray does not run."


def test_one_that_dies_is_not_replaced_where_the_run_can_not_continue(run):
    async def steps() -> None:
        await run.update(1)
        replica = Replica(run.processes[0], run.manager, policy(), run.said.append, lambda: NO_RAY)
        run.processes[0].deaths = ["rollout"]
        for _ in range(2):  # the second call finds a dead process that has left the sync
            run.processes[0].deaths = ["rollout"]
            with pytest.raises(WorkerDiedError):
                await replica.call("rollout", b"row", timeout_s=60)
        assert run.processes[0].started == 1
        assert (run.manager.receivers, dict(run.manager.quarantined)) == (("rollout-1",), {})
        assert await run.update(2) == ("rollout-1",)

    asyncio.run(steps())


@pytest.mark.parametrize("run", [("shm", 1)], indirect=True)
def test_an_update_that_finds_no_replica_ends_where_the_run_can_not_continue(run):
    async def steps() -> None:
        await run.update(1)
        (process,) = run.processes
        process.deaths = ["weights.receive"]
        sync = ReplicaSync(run.manager, [Replica(process, run.manager, policy(), run.said.append, lambda: NO_RAY)])
        with pytest.raises(WorkerDiedError, match="rollout-0 is lost and gets no new process: Ray does not run"):
            await sync.update_weights(2)
        assert process.started == 1

    asyncio.run(steps())


def test_one_that_fails_or_hangs_is_not_replaced(run):
    async def fail(method: str, payload: bytes, *, timeout_s: float) -> bytes:
        raise WorkerError(f"did not answer {method} within {timeout_s:g} s")

    run.processes[0].call = fail
    with pytest.raises(WorkerError, match="did not answer rollout within 9 s"):
        asyncio.run(run.generate())
    assert run.processes[0].started == 1


@pytest.mark.parametrize(("whole", "level"), [(True, 2), (False, 1)], ids=["whole weights", "adapters"])
def test_replicas_sleep_while_the_models_are_updated(run, whole, level):
    """Weights that are sent again are dropped; without an update only keys and values are freed."""
    sinks = [process.sink for process in run.processes]
    sync = ReplicaSync(run.manager, run.replicas, whole=whole)

    async def body():
        assert await sync.sleep(weights_follow=False) == 800
        assert [(sink.level, sink.asleep) for sink in sinks] == [(1, ("kv_cache",))] * 2
        await sync.wake("kv_cache")
        assert await sync.sleep(weights_follow=True) == 800
        assert [(sink.level, sink.asleep) for sink in sinks] == [(level, ("weights", "kv_cache"))] * 2
        await sync.wake("weights")
        assert {sink.asleep for sink in sinks} == {("kv_cache",)}
        await run.update(1)
        await sync.wake("kv_cache")
        assert {sink.asleep for sink in sinks} == {()}
        assert await run.generate() == ["row by 1 with 1"] * 2

    asyncio.run(body())


@pytest.mark.parametrize("dies", ["weights.sleep", "weights.wake"])
@pytest.mark.parametrize("run", [("shm", 1)], indirect=True)
def test_a_single_replica_that_dies_asleep_is_replaced_and_gets_the_new_weights(run, dies):
    async def body():
        await run.update(1)
        run.processes[0].deaths = [dies]
        await run.sync.sleep(weights_follow=True)
        await run.sync.wake("weights")
        await run.update(2)
        await run.sync.wake("kv_cache")
        assert await run.generate() == ["row by 2 with 2"]

    asyncio.run(body())


def test_replicas_that_can_not_be_replaced_and_do_not_sleep_end_the_run(run):
    for process in run.processes:
        process.deaths = ["weights.sleep"]
    with pytest.raises(WeightSyncError, match="'sleep' failed on every replica"):
        asyncio.run(ReplicaSync(run.manager, []).sleep(weights_follow=True))


class Broken(CheckpointEngineManager):
    """A manager of the user's."""

    async def update_weights(self, version: int):
        raise KeyError(f"version {version}")


def test_a_manager_of_the_users_that_raises_ends_the_run_with_its_name_and_line(run):
    sync = ReplicaSync(Broken(run.sender, []), run.replicas)
    with pytest.raises(RLError, match=r"weight manager Broken failed: KeyError: 'version 1' \(.*replicas\.py:\d+\)"):
        asyncio.run(sync.update_weights(1))
