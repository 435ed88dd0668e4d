"""Membership in a group, with a group whose end can be watched."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import msgspec
import pytest

from rl_ckpt_engine import CheckpointEngineConfig
from rl_ckpt_engine.engines.network import process_group
from rl_ckpt_engine.engines.network.process_group import ProcessGroup, places_of
from rl_ckpt_engine.engines.network.torch_group import GlooCollective, GlooEngine
from rl_ckpt_engine.testing import make_weights
from rl_protocol import ConfigError, WeightSyncError


def test_leaving_a_group_does_not_wait_for_its_destructor():
    """That of gloo waits for a broadcast that began during the abort."""
    seen, release, ended = [], threading.Event(), threading.Event()

    class Group:
        def abort(self):
            seen.append("abort")
            raise RuntimeError("a member died")

        def __del__(self):
            release.wait(60)
            ended.set()

    group = ProcessGroup("127.0.0.1", GlooCollective(), abandoned=lambda: None)
    group._group = Group()
    group.leave()
    assert seen == ["abort"]
    assert not ended.is_set()
    release.set()
    assert ended.wait(60)
    group.leave()
    assert seen == ["abort"]


def test_a_group_is_destroyed_by_the_thread_for_which_the_end_of_the_process_waits(monkeypatch):
    """The one in which it was formed may still run when it is left, and the interpreter stops that
    one within C++."""
    destroyed, ended, release = [], threading.Event(), threading.Event()

    class Group:
        def abort(self):
            pass

        def __del__(self):
            destroyed.append(threading.current_thread().name)
            ended.set()

    class Formed:
        def form(self, *_):
            return Group()

    async def join():
        loop = asyncio.get_running_loop()
        schedule = loop.call_soon_threadsafe

        def slowly(*args):
            schedule(*args)
            release.wait(60)

        monkeypatch.setattr(loop, "call_soon_threadsafe", slowly)
        await group.join(timeout_s=60)

    group = ProcessGroup("127.0.0.1", Formed(), abandoned=lambda: None)
    group.place(places_of(group.member(), []).sender)
    asyncio.run(join())
    group.leave()
    found = ended.wait(10)
    release.set()
    assert found
    assert destroyed == ["rl-ckpt-abort"]
    group.close()


CLOSED_AT_THE_END = """
import asyncio
from rl_ckpt_engine.engines.network.torch_group import GlooEngine

async def join():
    sender, receiver = GlooEngine(), GlooEngine()
    topology = GlooEngine.build_topology(sender.prepare(), [receiver.prepare()])
    for engine, place in ((sender, topology.sender), (receiver, topology.receivers[0])):
        engine.init_process_group(place)
    await asyncio.gather(sender.join(timeout_s=60), receiver.join(timeout_s=60))
    return sender, receiver

for engine in asyncio.run(join()):
    engine.close()
"""


def test_a_process_that_closes_its_engines_at_its_end_exits_with_status_0():
    """The groups are destroyed in threads; the interpreter would stop those within C++."""
    done = subprocess.run([sys.executable, "-c", CLOSED_AT_THE_END], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_member_without_a_group_says_what_the_manager_needs():
    group = ProcessGroup("127.0.0.1", GlooCollective(), abandoned=lambda: None)
    with pytest.raises(WeightSyncError, match=r"if it has the engine's class: .*registry\.resolve\(config\)"):
        group.require()


def test_the_sender_listens_at_its_address_and_receivers_find_the_way_there():
    """127.0.0.2 is another address of loopback, at which no other socket of the test listens."""
    sender = GlooEngine(CheckpointEngineConfig(listen="127.0.0.2"))
    receiver = GlooEngine()
    topology = GlooEngine.build_topology(sender.prepare(), [receiver.prepare()])
    assert {msgspec.msgpack.decode(place)["host"] for place in (topology.sender, *topology.receivers)} == {"127.0.0.2"}
    weights = make_weights([(1000, 100), (7,)], seed=3)

    async def move():
        for engine, place in ((sender, topology.sender), (receiver, topology.receivers[0])):
            engine.init_process_group(place)
        await asyncio.gather(sender.join(timeout_s=60), receiver.join(timeout_s=60))
        manifest = await sender.send_weights(weights, 1, timeout_s=60)
        received, _ = await asyncio.gather(
            receiver.receive_weights(manifest, timeout_s=60), sender.serve(manifest, timeout_s=60)
        )
        return [(one.name, one.data.tobytes()) for one in received]

    try:
        assert asyncio.run(move()) == [(one.name, one.data.tobytes()) for one in weights]
    finally:
        sender.close()
        receiver.close()


def test_an_address_that_other_hosts_reach_needs_a_trusted_network(monkeypatch):
    monkeypatch.delenv("RL_CKPT_TRUSTED_NETWORK", raising=False)
    config = CheckpointEngineConfig(listen="192.0.2.1")
    with pytest.raises(
        ConfigError, match=r"192\.0\.2\.1 accepts other hosts.* RL_CKPT_TRUSTED_NETWORK=1 .*'gloo' has no keys"
    ):
        GlooEngine(config)
    monkeypatch.setenv("RL_CKPT_TRUSTED_NETWORK", "1")
    here, elsewhere = GlooEngine(), GlooEngine(config)  # 192.0.2.1 is an address of another host
    try:
        assert places_of(here.prepare(), [elsewhere.prepare()]).receivers
        with pytest.raises(WeightSyncError, match=r"can't listen at 192\.0\.2\.1.* set CheckpointEngineConfig\.listen"):
            places_of(elsewhere.prepare(), [here.prepare()])
    finally:
        elsewhere.close()
        here.close()


def test_a_receiver_without_a_way_to_the_sender_says_so(monkeypatch):
    def no_way(peer):
        raise ConfigError(f"no route to {peer}")

    monkeypatch.setattr(process_group, "interface_towards", no_way)
    sender, receiver = GlooEngine(), GlooEngine()
    receiver.init_process_group(places_of(sender.prepare(), [receiver.prepare()]).receivers[0])
    with pytest.raises(WeightSyncError, match=r"Joining a group failed: no route to 127\.0\.0\.1"):
        asyncio.run(receiver.join(timeout_s=60))
    sender.close()
    receiver.close()
