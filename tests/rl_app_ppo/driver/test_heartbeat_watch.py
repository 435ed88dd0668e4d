"""Real processes that stop are killed, and others are not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from rl_app_ppo.driver.heartbeat_watch import Watched, heartbeat_watch
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
    yield started, {p.pid: Watched(f"Worker {f.name}", f) for p, f in zip(started, files, strict=True)}
    for process in started:
        process.kill()
        process.wait()


def watched_until(ended, heartbeat_s, watched, say):
    async def body():
        async with heartbeat_watch(heartbeat_s, lambda: watched, say):
            deadline = time.monotonic() + 60
            while not ended():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)

    asyncio.run(body())


def test_a_stopped_process_is_killed_and_the_other_is_not(pair):
    (actor, rollout), watched = pair
    said = []
    os.kill(rollout.pid, signal.SIGSTOP)
    watched_until(lambda: rollout.poll() is not None, 2.0, watched, said.append)
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
        async with heartbeat_watch(2.0, lambda: watched, said.append):
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
