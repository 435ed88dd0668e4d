"""Engines `nixl` and `mooncake` on one host, if their libraries are installed; no GPU needed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import AsyncExitStack

import psutil
import pytest
from ckpt_remote import SHAPES, loads, started

from rl_ckpt_engine import CheckpointEngine, CheckpointEngineConfig, CheckpointEngineRegistry, Manifest
from rl_ckpt_engine.testing import EngineConformance, assert_same, make_weights, refusal
from rl_protocol.errors import ConfigError, WeightSyncError

NIXL, MOONCAKE = loads("nixl_cu12", "nixl_cu13"), loads("mooncake.engine")
needs_nixl = pytest.mark.skipif(not NIXL, reason="NIXL is not installed: rl-ckpt-engine[nixl]")
needs_mooncake = pytest.mark.skipif(not MOONCAKE, reason="Mooncake is not installed: rl-ckpt-engine[mooncake]")
each_engine = pytest.mark.parametrize(
    "engine", [pytest.param("nixl", marks=needs_nixl), pytest.param("mooncake", marks=needs_mooncake)]
)
T = 120.0


@pytest.fixture(autouse=True)
def operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declare the network as trusted."""
    monkeypatch.setenv("RL_CKPT_TRUSTED_NETWORK", "1")


def make(engine: str) -> CheckpointEngine:
    """Create the engine with small buckets, so that tensors span several."""
    return CheckpointEngineRegistry().create(engine, CheckpointEngineConfig(bucket_mb=0.1))


def joined(manifest: Manifest) -> CheckpointEngine:
    receiver = make(manifest.engine)
    receiver.init_process_group(type(receiver).build_topology(manifest.sender, [receiver.prepare()]).receivers[0])
    return receiver


@pytest.mark.parametrize(("engine", "installed"), [("nixl", NIXL), ("mooncake", MOONCAKE)])
def test_without_its_library_the_error_says_what_to_install(engine: str, installed: bool) -> None:
    if installed:
        pytest.skip("it is installed")
    with pytest.raises(ConfigError, match=rf"rl-ckpt-engine\[{engine}\]"):
        make(engine)


@needs_mooncake
@pytest.mark.parametrize("said", ["", "0", "yes"])
def test_mooncake_starts_only_where_the_operator_trusts_the_network(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("RL_CKPT_TRUSTED_NETWORK", said)
    before = listening()
    with pytest.raises(ConfigError, match=r"listens at all addresses .* RL_CKPT_TRUSTED_NETWORK=1"):
        make("mooncake")
    assert listening() == before


@needs_nixl
@pytest.mark.slow
class TestNixl(EngineConformance):
    def make_engine(self) -> CheckpointEngine:
        return make("nixl")


@needs_mooncake
@pytest.mark.slow
class TestMooncake(EngineConformance):
    def make_engine(self) -> CheckpointEngine:
        return make("mooncake")


@each_engine
def test_memory_may_grow_between_versions_and_the_registration_follows(engine: str) -> None:
    sender = make(engine)
    sender.init_process_group(type(sender).build_topology(sender.prepare(), []).sender)
    receiver: CheckpointEngine | None = None
    for version, shapes in enumerate([[(10,)], [(10,)], [(300_000,), (0,)], [(900_000,)], [(7,)]], start=1):
        weights = make_weights(shapes, seed=version)
        manifest = asyncio.run(sender.send_weights(weights, version, timeout_s=T))
        receiver = receiver or joined(manifest)
        assert_same(asyncio.run(receiver.receive_weights(manifest, timeout_s=T)), weights)
        sender.finalize(version)
    assert receiver is not None
    receiver.close()
    sender.close()


@each_engine
def test_a_byte_that_changes_in_the_senders_memory_is_noticed(engine: str) -> None:
    sender = make(engine)
    sender.init_process_group(type(sender).build_topology(sender.prepare(), []).sender)
    weights = make_weights(SHAPES, seed=1)
    manifest = asyncio.run(sender.send_weights(weights, 1, timeout_s=T))
    fd = sender._sending.versions.pending.held.fd
    at = 4096 + manifest.tensors[0].offset + 100
    right = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([right[0] ^ 1]), at)
    receiver = joined(manifest)
    assert "'w0' of version 1 arrived damaged" in refusal(receiver.receive_weights(manifest, timeout_s=T))
    os.pwrite(fd, right, at)
    assert_same(asyncio.run(receiver.receive_weights(manifest, timeout_s=T)), weights)
    sender.abort()
    assert "is no longer available" in refusal(receiver.receive_weights(manifest, timeout_s=T))
    receiver.close()
    sender.close()


def listening():
    return {c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}


@needs_nixl
def test_nixl_listens_at_loopback_alone_and_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    before = listening()
    sender = make("nixl")
    asyncio.run(sender.send_weights(make_weights([(3,)]), 1, timeout_s=T))
    new = listening() - before
    assert new
    assert {address.ip for address in new} == {"127.0.0.1"}
    assert "UCX_NET_DEVICES" not in os.environ
    sender.close()


@each_engine
@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_sender_that_stops_or_dies_is_a_named_error_and_another_takes_its_place(engine: str, how: str) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            sender, other = [await stack.enter_async_context(started("sender", n, engine)) for n in ("s", "other")]
            first = Manifest.decode((await sender.send(1, T)).manifest)
            receiver = joined(first)
            if how == "killed":
                assert_same(await receiver.receive_weights(first, timeout_s=T), make_weights(SHAPES, seed=1))
                await sender.finalize(1)
                first = Manifest.decode((await sender.send(2, T)).manifest)
                await sender.kill()
            # Stop it before the first connection: later, UCX can read from a stopped process.
            else:
                sender.process.send_signal(signal.SIGSTOP)
            start = time.monotonic()
            with pytest.raises(WeightSyncError, match=r"did not finish within 2 s|A new sync is needed"):
                await receiver.receive_weights(first, timeout_s=2)
            assert time.monotonic() - start < 60
            second = Manifest.decode((await other.send(3, T)).manifest)
            receiver.init_process_group(type(receiver).build_topology(second.sender, [receiver.prepare()]).receivers[0])
            assert_same(await receiver.receive_weights(second, timeout_s=T), make_weights(SHAPES, seed=3))
            receiver.close()

    asyncio.run(run())
