"""Real processes that stop are killed, and others are not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_app_ppo.cluster.heartbeats import OtherHost, Watched
from rl_app_ppo.cluster.hung_processes import HungProcesses
from rl_app_ppo.driver.heartbeat_watch import heartbeat_watch
from rl_protocol import WorkerError
from rl_protocol.support.heartbeat import read_beat

PROGRAM = """
import pathlib, sys, time
from rl_protocol.support.heartbeat import beat
beat(pathlib.Path(sys.argv[1]), 0.02)
time.sleep(100)
"""


@pytest.fixture
def pair(tmp_path):
    """Two processes with heartbeats, and what is watched of them."""
    files = [tmp_path / name for name in ("actor", "rollout-0")]
    started = [subprocess.Popen([sys.executable, "-c", PROGRAM, str(file)]) for file in files]
    deadline = time.monotonic() + 60
    while not all(map(read_beat, files)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield started, [Watched(f"Worker {f.name}", p.pid, f) for p, f in zip(started, files, strict=True)]
    for process in started:
        process.kill()
        process.wait()


def watched_until(ended, heartbeat_s, watched, say, others=None):
    """Watch until `ended`; returns the processes that were killed."""
    hung = HungProcesses()

    async def body():
        async with heartbeat_watch(heartbeat_s, lambda: watched, others, hung, say):
            deadline = time.monotonic() + 60
            while not ended():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)

    asyncio.run(body())
    return hung


def test_a_stopped_process_is_killed_and_the_other_is_not(pair):
    (actor, rollout), watched = pair
    said = []
    os.kill(rollout.pid, signal.SIGSTOP)
    hung = watched_until(lambda: rollout.poll() is not None, 2.0, watched, said.append)
    assert hung.end_of(rollout.pid) == "hung for 2 s (restart.heartbeat_s) and was therefore killed"
    assert hung.end_of(actor.pid) == ""
    assert (rollout.returncode, actor.poll()) == (-signal.SIGKILL, None)
    assert said == [
        f"Worker rollout-0 (process {rollout.pid}) has not moved for 2 s (restart.heartbeat_s), so it is killed"
    ]


def test_one_that_has_ended_is_not_named(pair):
    (actor, _), watched = pair
    actor.kill()  # and it is a zombie: nobody has waited for it
    said, ends = [], time.monotonic() + 3.0
    watched_until(lambda: time.monotonic() > ends, 1.0, watched, said.append)
    assert said == []


def test_a_driver_that_was_stopped_with_its_processes_kills_none(pair):
    """As when a laptop sleeps: the driver looks once after it, whatever time has passed."""
    (_, rollout), watched = pair
    said = []

    async def body():
        async with heartbeat_watch(2.0, lambda: watched, None, HungProcesses(), said.append):
            await asyncio.sleep(0.5)
            os.kill(rollout.pid, signal.SIGSTOP)
            time.sleep(5.0)  # noqa: ASYNC251 - the event loop stands still, too
            os.kill(rollout.pid, signal.SIGCONT)
            await asyncio.sleep(1.0)

    asyncio.run(body())
    assert (rollout.poll(), said) == (None, [])


def test_without_a_limit_nothing_is_watched(pair):
    (_, rollout), watched = pair
    os.kill(rollout.pid, signal.SIGSTOP)
    ends = time.monotonic() + 1.0
    watched_until(lambda: time.monotonic() > ends, 0.0, watched, [].append)
    assert rollout.poll() is None


GPU_2 = OtherHost(name="gpu-2", memory="m2", node="n2", address="10.0.0.2")
GPU_3 = OtherHost(name="gpu-3", memory="m3", node="n3", address="10.0.0.3")
ON_2 = Watched("Worker rollout-1 on gpu-2 (node 10.0.0.2)", 41, Path("/proc/41/fd/7"), GPU_2)
ON_3 = Watched("Storage unit 0 of the data plane on gpu-3 (node 10.0.0.3)", 41, Path("41.beat"), GPU_3)


class Hosts:
    """Other hosts: `answer` says what each call of `counts` returns or raises."""

    def __init__(self, answer):
        self.answer = answer
        self.looks = []
        self.killed = []

    async def counts(self, host, files):
        self.looks.append(host)
        return await self.answer(host, files, self.looks.count(host))

    async def kill(self, host, pid):
        self.killed.append((host, pid))
        return True


def test_a_still_process_of_another_host_is_killed_there():
    """At its eleventh look: ten with the same count as before. One of the same id, of another host,
    counts."""

    async def answer(host, files, look):
        assert files == {41: ON_2.file if host is GPU_2 else ON_3.file}
        return {41: 7 if host is GPU_2 else look}

    said, hosts = [], Hosts(answer)
    hung = watched_until(lambda: hosts.killed and hosts.looks.count(GPU_3) > 11, 0.2, [ON_2, ON_3], said.append, hosts)
    ends = [hung.end_of(41, GPU_2), hung.end_by_name(ON_2.name), hung.end_of(41, GPU_3), hung.end_of(41)]
    assert [bool(end) for end in ends] == [True, True, False, False]
    assert set(hosts.killed) == {(GPU_2, 41)}
    assert said[0] == (
        "Worker rollout-1 on gpu-2 (node 10.0.0.2) (process 41) has not moved for 0.2 s (restart.heartbeat_s), so it is killed"
    )


def test_one_that_has_ended_by_its_kill_is_not_named():
    async def answer(*_):
        return {41: 7}

    async def kill(host, pid):
        hosts.killed.append((host, pid))
        return False

    said, hosts = [], Hosts(answer)
    hosts.kill = kill
    hung = watched_until(lambda: hosts.killed, 0.2, [ON_2], said.append, hosts)
    assert said == []
    assert hung.end_of(41, GPU_2) == hung.end_by_name(ON_2.name) == ""


def test_looks_that_fail_are_not_looks_at_a_still_process(caplog):
    """Of ten counts the first is new, so there are nine looks at the same one."""

    async def answer(host, files, look):
        if look > 20:
            await asyncio.Event().wait()
        if look % 2:
            raise WorkerError("no node")
        return {41: 7}

    hosts = Hosts(answer)
    watched_until(lambda: len(hosts.looks) > 20, 0.2, [ON_2], [].append, hosts)
    assert hosts.killed == []
    assert "No process of gpu-2 (node 10.0.0.2) is watched: no node" in caplog.text


def test_a_host_that_is_gone_is_named_once(caplog):
    async def answer(*_):
        raise WorkerError("no node")

    hosts = Hosts(answer)
    watched_until(lambda: len(hosts.looks) > 5, 0.2, [ON_2], [].append, hosts)
    assert caplog.text.count("No process of gpu-2 (node 10.0.0.2) is watched: no node") == 1


async def no_answer(*_):
    await asyncio.Event().wait()


def test_a_host_that_does_not_answer_is_asked_again_after_the_limit(caplog):
    hosts = Hosts(no_answer)
    watched_until(lambda: len(hosts.looks) > 1, 0.2, [ON_2], [].append, hosts)
    assert "No process of gpu-2 (node 10.0.0.2) is watched: no answer within 0.2 s" in caplog.text
    assert hosts.killed == []


def test_a_host_that_does_not_answer_keeps_no_other_from_being_watched(pair):
    (_, rollout), watched = pair
    said, hosts = [], Hosts(no_answer)
    os.kill(rollout.pid, signal.SIGSTOP)
    watched_until(lambda: rollout.poll() is not None, 2.0, [*watched, ON_2], said.append, hosts)
    assert (len(said), hosts.killed) == (1, [])
    assert hosts.looks
