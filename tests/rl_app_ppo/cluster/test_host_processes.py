"""The driver's handles of the processes of other hosts, when these answer, fail and end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from rl_app_ppo.cluster.heartbeats import OtherHost, Watched
from rl_app_ppo.cluster.host_processes import HostProcesses, StartedUnits
from rl_app_ppo.rank_network import RankNetwork
from rl_protocol import PlaneLostError, WorkerError
from rl_transferqueue import TransferQueueConfig
from rl_transferqueue.wire.descriptor import UnitAddress
from rl_transferqueue.wire.process_liveness import this_process

HOSTS = [OtherHost(name=f"gpu-{n}", memory=f"m{n}", node=f"n{n}", address=f"10.0.0.{n}") for n in (2, 3)]
FILES = {41: Path("/proc/41/fd/7")}
UNIT = UnitAddress("u0", this_process(), 3, 8, "tcp://10.0.0.2:1", "m2", "tcp://10.0.0.2:2")


class Actors(HostProcesses):
    """HostProcesses whose actors answer each call with what `answer` returns or raises."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer
        self.started = []

    def _start(self, host):
        self.started.append(host)

        def method(name):
            async def remote(*arguments):
                return self.answer(host, name, *arguments)

            return SimpleNamespace(remote=remote)

        return SimpleNamespace(**{name: method(name) for name in ("counts", "kill", "start_units")})


def test_a_host_has_one_process_and_another_after_its_end():
    def answer(host, name, what):
        if died:
            raise ActorDiedError
        return {41: 7} if name == "counts" else what == 41

    died, actors = [], Actors(answer)
    first, second = HOSTS
    assert asyncio.run(actors.counts(first, FILES)) == {41: 7}
    assert asyncio.run(actors.kill(first, 41))
    assert actors.started == [first]
    died.append(first)
    with pytest.raises(WorkerError, match=r"The heartbeats of gpu-2 \(node 10\.0\.0\.2\) can't be read: The actor "):
        asyncio.run(actors.counts(first, FILES))
    died.clear()
    assert asyncio.run(actors.counts(first, FILES)) == {41: 7}
    assert not asyncio.run(actors.kill(second, 42))
    assert actors.started == [first, first, second]


def test_an_error_of_the_process_is_named_and_does_not_end_it():
    def answer(*_):
        raise RayTaskError("HostProcess.kill", "KeyError: 41", KeyError(41))

    actors = Actors(answer)
    for _ in range(2):
        with pytest.raises(WorkerError, match=r"Process 41 of gpu-2 \(node .*\) can't be killed: KeyError: 41"):
            asyncio.run(actors.kill(HOSTS[0], 41))
    assert actors.started == HOSTS[:1]


def start(actors, timeout_s=60.0):
    hosts = dict.fromkeys(HOSTS, RankNetwork(interface="eth0"))
    return asyncio.run(actors.start_units(TransferQueueConfig(), hosts, Path("logs"), timeout_s))


def test_the_units_of_all_hosts_are_watched():
    def answer(host, name, settings, network, logs):
        assert msgspec.msgpack.decode(network, type=RankNetwork).interface == "eth0"
        folders.append(logs)
        beats = {41: "/a/41.beat", 42: "/a/42.beat"} if host is HOSTS[0] else {41: "/b/41.beat"}
        return msgspec.msgpack.encode(StartedUnits(addresses=(UNIT,) * len(beats), heartbeats=beats))

    folders, actors = [], Actors(answer)
    assert start(actors) == [UNIT] * 3
    assert folders == [Path("logs/units-1"), Path("logs/units-2")]
    names = [
        f"Storage unit {n} of the data plane on {host}" for n, host in ((0, HOSTS[0]), (1, HOSTS[0]), (0, HOSTS[1]))
    ]
    assert actors.units == [
        Watched(names[0], 41, Path("/a/41.beat"), HOSTS[0]),
        Watched(names[1], 42, Path("/a/42.beat"), HOSTS[0]),
        Watched(names[2], 41, Path("/b/41.beat"), HOSTS[1]),
    ]


def test_units_that_do_not_start_are_named():
    def fail(*_):
        raise RayTaskError("HostProcess.start_units", "", PlaneLostError("unit-0 ended"))

    with pytest.raises(PlaneLostError, match="unit-0 ended"):
        start(Actors(fail))

    class Silent(Actors):
        def _start(self, host):
            return SimpleNamespace(start_units=SimpleNamespace(remote=lambda *_: asyncio.sleep(1000)))

    with pytest.raises(
        WorkerError,
        match=r"data plane on gpu-2 \(node 10\.0\.0\.2\) did not start within 0\.1 s \(ray\.start_timeout_s\)",
    ):
        start(Silent(None), 0.1)
