"""The driver's handle of a worker process when the process stops answering."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from ray.exceptions import ActorDiedError, RayTaskError, UnserializableException

from rl_app_ppo.cluster import ray_actor
from rl_app_ppo.cluster.heartbeats import OtherHost, Watched
from rl_app_ppo.cluster.hung_processes import HungProcesses
from rl_app_ppo.cluster.lost_processes import ended
from rl_app_ppo.cluster.ray_actor import RayProcess, RayWorker
from rl_app_ppo.rank_network import RankNetwork
from rl_app_ppo.worker.call_socket import CallServer
from rl_app_ppo.worker.messages import WorkerPlace
from rl_protocol import ConfigError, RewardError, WorkerDiedError, WorkerError
from rl_protocol.support.host_identity import this_host


class Stopped:
    """A Ray actor that never answers, as with a reward function that never returns."""

    @classmethod
    def options(cls, **_):
        return cls

    @classmethod
    def remote(cls, *_, **__):
        return cls

    call = SimpleNamespace(remote=lambda *_: asyncio.get_running_loop().create_future())


def test_a_worker_that_hangs_is_named_at_its_deadline_and_blocks_no_other(tmp_path, monkeypatch):
    """The driver enforces the deadline, without a signal in the worker; its other tasks run on."""
    monkeypatch.setattr(ray_actor, "_actor_class", Stopped)
    process = RayProcess(["reward"], "judge", tmp_path / "judge.log", 1)
    worker, ticks = RayWorker(process, "reward", "judge"), 0

    async def body() -> None:
        nonlocal ticks
        start = time.monotonic()
        hanging = asyncio.create_task(worker.call("reward", b"rows", timeout_s=0.2))
        while not hanging.done():
            ticks += 1
            await asyncio.sleep(0.01)
        late = r"Worker judge did not answer reward within 0\.2 s; raise trainer\.stage_timeout_s .*judge\.log"
        with pytest.raises(WorkerError, match=late):
            await hanging
        assert time.monotonic() - start > 0.19

    asyncio.run(body())
    assert ticks > 1
    assert worker.bytes_moved == len(b"rows")


@pytest.mark.parametrize("method", ["build", "rendezvous"])
def test_a_late_start_names_the_setting_of_its_deadline(method, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_actor, "_actor_class", Stopped)
    monkeypatch.setattr(Stopped, "rendezvous", Stopped.call, raising=False)
    process = RayProcess(["rollout"], "rollout-0", tmp_path / "rollout-0.log", 1)
    argument = b"" if method == "build" else RankNetwork()
    with pytest.raises(WorkerError, match=rf"did not answer {method} within 0\.1 s; raise ray\.start_timeout_s "):
        asyncio.run(getattr(process, method)(argument, timeout_s=0.1))


def test_a_start_does_not_wait_once_a_process_that_the_run_needs_has_ended(tmp_path, monkeypatch):
    """Ray answers no start once the driver's connection to the raylet is closed."""
    never = SimpleNamespace(remote=lambda: asyncio.get_running_loop().create_future())
    monkeypatch.setattr(ray_actor, "_actor_class", Stopped)
    monkeypatch.setattr(Stopped, "place", never, raising=False)
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    needed = {os.getpid(): "Worker critic", gone.pid: "Worker actor"}
    process = RayProcess(["rollout"], "rollout-0", tmp_path / "rollout-0.log", 1, others=lambda: ended(needed))
    with pytest.raises(
        WorkerDiedError, match=rf"^Worker rollout-0 can't start: Worker actor \(process {gone.pid}\) is gone\.$"
    ):
        asyncio.run(process.ready(timeout_s=600))


def test_a_start_that_waits_for_a_node_says_so_at_once_and_at_its_deadline(tmp_path, monkeypatch):
    never = SimpleNamespace(remote=lambda: asyncio.get_running_loop().create_future())
    monkeypatch.setattr(ray_actor, "_actor_class", Stopped)
    monkeypatch.setattr(Stopped, "place", never, raising=False)
    monkeypatch.setattr(ray_actor, "_LOOK_S", 0.0)
    said, looks = list[str](), iter(["", "host 2: 0 GPUs, 1 CPUs (rollout-1)"])

    async def body(timeout_s: float) -> None:
        told = asyncio.Event()
        process = RayProcess(
            *(["rollout"], "rollout-1", tmp_path / "rollout-1.log", 1),
            missing_node=lambda: next(looks, "host 2: 0 GPUs, 1 CPUs (rollout-1)"),
            say=lambda line: (said.append(line), told.set()),
        )
        process._address = "10.0.0.3"
        starting = asyncio.create_task(process.ready(timeout_s))
        if timeout_s > 60:
            await asyncio.wait_for(told.wait(), 60)
            starting.cancel()
        await starting

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(body(120))
    lacks = "Node 10.0.0.3 is gone, and the Ray cluster has no other one for host 2: 0 GPUs, 1 CPUs (rollout-1). "
    assert said == [
        f"worker rollout-1 can't start yet: {lacks}The run waits up to 120 s (ray.start_timeout_s) for a node to join; or stop it, and "
        "resume it later with trainer.resume_mode=auto"
    ]
    with pytest.raises(WorkerError) as late:
        asyncio.run(body(0.1))
    assert f"did not start within 0.1 s (ray.start_timeout_s). {lacks}Add a node, or raise " in late.value.message


class Served:
    """A Ray actor that takes calls at a Unix socket; `listening` is its server."""

    def __init__(self, call):
        self._calls = CallServer(call)
        self.died = asyncio.Event()
        self.listen = SimpleNamespace(remote=self._listen)
        self.raise_error = SimpleNamespace(remote=self._raise_error)
        self.stay = SimpleNamespace(remote=self._stay)

    async def _listen(self, path):
        self.listening = await self._calls.listen(Path(path))

    async def _raise_error(self, number):
        raise self._calls.take_error(number)

    async def _stay(self):
        await self.died.wait()
        raise ActorDiedError


def test_calls_over_a_socket_answer_fail_and_end_as_those_of_ray(tmp_path, monkeypatch):
    async def call(role, method, payload):
        if method == "score":
            raise RewardError("row 3 has no truth")
        if method == "filter":  # as Ray raises an exception of a library that it can't unpickle
            raise UnserializableException("Traceback (most recent call last):\n  ...\nOdd: no memory\n")
        if method == "last":
            process.actor.died.set()
            await asyncio.Event().wait()
        return f"{role} {method} ".encode() + payload

    class Process(RayProcess):
        def _start(self):
            return Served(call)

    process = Process(["reward"], "judge", tmp_path / "judge.log", 1)
    process.pid, worker = 7, RayWorker(process, "reward", "judge")

    async def body() -> None:
        await process.connect(tmp_path)
        assert await worker.call("adv", b"rows", timeout_s=20.0) == b"reward adv rows"
        assert worker.bytes_moved == len(b"rows" + b"reward adv rows")
        with pytest.raises(RewardError, match="row 3 has no truth"):
            await worker.call("score", b"", timeout_s=20.0)
        with pytest.raises(WorkerError, match=r"Worker judge failed in filter: Odd: no memory\. Its log: .*judge\.log"):
            await worker.call("filter", b"", timeout_s=20.0)
        with pytest.raises(WorkerDiedError, match="Worker judge died during last"):
            await worker.call("last", b"", timeout_s=20.0)
        with pytest.raises(WorkerDiedError, match="Worker judge died during adv"):
            await worker.call("adv", b"", timeout_s=20.0)
        process.actor.listening.close()

    asyncio.run(body())


def test_a_process_of_another_host_or_with_a_long_path_is_called_through_ray(tmp_path):
    class Process(RayProcess):
        def _start(self):
            return SimpleNamespace(call=SimpleNamespace(remote=self.answer), stay=SimpleNamespace(remote=self.answer))

        async def answer(self, *_):
            return b"through Ray"

    async def body(pid: int, folder: Path) -> bytes:
        process = Process(["reward"], "judge", tmp_path / "judge.log", 1)
        process.pid = pid
        await process.connect(folder)
        return await process.call("reward", "adv", b"")

    assert asyncio.run(body(0, tmp_path)) == b"through Ray"
    assert asyncio.run(body(7, tmp_path / ("long" * 40))) == b"through Ray"


def test_a_process_that_closes_its_connection_and_lives_is_killed(tmp_path, monkeypatch, caplog):
    """Nothing could call it again, and a call would wait for its deadline."""

    async def call(role, method, payload):
        if method == "last":
            process._connection.close()
            await asyncio.Event().wait()
        return payload

    class Process(RayProcess):
        def _start(self):
            return Served(call)

    monkeypatch.setattr(ray_actor, "_END_S", 0.05)
    monkeypatch.setattr(ray_actor.ray, "kill", lambda actor: actor.died.set())
    process = Process(["reward"], "judge", tmp_path / "judge.log", 1)
    process.pid, worker = 7, RayWorker(process, "reward", "judge")

    async def body() -> None:
        await process.connect(tmp_path)
        calls = [worker.call("last", b"", timeout_s=60.0) for _ in range(2)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(answer).startswith("Worker judge died during last") for answer in answers] == [True, True]
        process.actor.listening.close()

    asyncio.run(body())
    assert "Worker judge has closed its connection and lives; it is killed." in caplog.text


@pytest.mark.parametrize(("seen", "words"), [("", "sees all of its node"), ("0,1,2", "sees GPUs 0,1,2 of its node")])
def test_a_ray_that_shows_other_gpus_than_it_reserves_is_refused(tmp_path, seen, words):
    """Every process would compute on the first of them."""

    class Process(RayProcess):
        def _start(self):
            return SimpleNamespace(place=SimpleNamespace(remote=self.place))

        async def place(self):
            return msgspec.msgpack.encode(
                WorkerPlace(host="h", memory=this_host(), network="n", pid=41, heartbeat="/h", gpus=seen)
            )

    process = Process(["actor"], "actor-1", tmp_path / "actor-1.log", 1, gpus=1)
    with pytest.raises(
        ConfigError, match=rf"actor-1 has 1 GPU and {words}: .* RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    ):
        asyncio.run(process.ready(60))


def test_a_process_of_another_host_that_dies_is_named_with_its_host(tmp_path):
    class Process(RayProcess):
        def _start(self):
            calls = {"place": self.place, "stay": self.die, "call": self.die}
            return SimpleNamespace(**{name: SimpleNamespace(remote=call) for name, call in calls.items()})

        def _node(self):
            return "n2", "10.0.0.2"

        async def place(self):
            place = WorkerPlace(host="gpu-2", memory="other", network="n", pid=41, heartbeat="/proc/41/fd/7")
            return msgspec.msgpack.encode(place)

        async def die(self, *_):
            raise ActorDiedError

    async def body() -> None:
        hung = HungProcesses()
        process = Process(["actor"], "actor-1", tmp_path / "actor-1.log", 1, hung=hung)
        assert process.watched is None
        await process.ready(60)
        host = OtherHost(name="gpu-2", memory="other", node="n2", address="10.0.0.2")
        watched = Watched("Worker actor-1 on gpu-2 (node 10.0.0.2)", 41, Path("/proc/41/fd/7"), host)
        assert (process.pid, process.host, process.watched) == (0, host, watched)
        await process.connect(tmp_path)
        with pytest.raises(WorkerDiedError, match=r"Worker actor-1 on gpu-2 \(node 10\.0\.0\.2\) died during update: "):
            await RayWorker(process, "actor", "actor-1").call("update", b"", timeout_s=20.0)
        hung.add(watched, 60.0)
        why = r"died during update: its process hung for 60 s \(restart\.heartbeat_s\) and was therefore killed\. Its log: "
        with pytest.raises(WorkerDiedError, match=why):
            await RayWorker(process, "actor", "actor-1").call("update", b"", timeout_s=20.0)
        await asyncio.wait([process.end], timeout=60)
        assert isinstance(process.end.exception(), ActorDiedError)
        assert process.watched is None

    asyncio.run(body())


def test_an_error_in_the_creation_of_a_process_is_no_death_which_a_restart_would_mend(tmp_path):
    class Process(RayProcess):
        def _start(self):
            return SimpleNamespace(place=SimpleNamespace(remote=self.fail))

        async def fail(self, *_):
            raise ActorDiedError(RayTaskError("WorkerProcess.__init__", "OSError: no space", OSError("no space")))

    process = Process(["actor"], "actor", tmp_path / "actor.log", 1)
    with pytest.raises(
        WorkerError, match=r"Worker actor failed in start: The actor died .* OSError: no space"
    ) as caught:
        asyncio.run(process.ready(60))
    assert not isinstance(caught.value, WorkerDiedError)
