"""Engine `nixl` over UCX on loopback, where NIXL is installed (rl-ckpt-engine[nixl]; no GPU is needed)."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import time
from contextlib import AsyncExitStack

import psutil
import pytest
from ckpt_remote import SHAPES, started

from rl_ckpt_engine import CheckpointEngine, CheckpointEngineConfig, CheckpointEngineRegistry, Manifest
from rl_ckpt_engine.testing import EngineConformance, assert_same, make_weights, refusal
from rl_protocol.errors import ConfigError, WeightSyncError

INSTALLED = any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13"))
needs_nixl = pytest.mark.skipif(not INSTALLED, reason="NIXL is not installed: rl-ckpt-engine[nixl]")
T = 20.0


def make() -> CheckpointEngine:
    """Small buckets: tensors cross their borders."""
    return CheckpointEngineRegistry().create("nixl", CheckpointEngineConfig(bucket_mb=0.1))


def joined(manifest: Manifest) -> CheckpointEngine:
    receiver = make()
    receiver.init_process_group(type(receiver).build_topology(manifest.sender, [receiver.prepare()]).receivers[0])
    return receiver


@pytest.mark.skipif(INSTALLED, reason="NIXL is installed")
def test_without_nixl_the_error_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"rl-ckpt-engine\[nixl\]"):
        make()


@needs_nixl
@pytest.mark.slow
class TestNixl(EngineConformance):
    def make_engine(self) -> CheckpointEngine:
        return make()


@needs_nixl
def test_memory_may_grow_between_versions_and_the_registration_follows() -> None:
    sender = make()
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


@needs_nixl
def test_a_byte_that_changes_in_the_senders_memory_is_noticed() -> None:
    sender = make()
    sender.init_process_group(type(sender).build_topology(sender.prepare(), []).sender)
    weights = make_weights(SHAPES, seed=1)
    manifest = asyncio.run(sender.send_weights(weights, 1, timeout_s=T))
    fd = sender._ledger.pending.held.fd
    at = 4096 + manifest.tensors[0].offset + 100
    right = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([right[0] ^ 1]), at)
    receiver = joined(manifest)
    assert "'w0' of version 1 arrived damaged" in refusal(receiver.receive_weights(manifest, timeout_s=T))
    os.pwrite(fd, right, at)
    assert_same(asyncio.run(receiver.receive_weights(manifest, timeout_s=T)), weights)
    sender.abort()
    assert "is not there any more" in refusal(receiver.receive_weights(manifest, timeout_s=T))
    receiver.close()
    sender.close()


@needs_nixl
def test_it_listens_at_loopback_alone_and_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    before = {c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
    sender = make()
    asyncio.run(sender.send_weights(make_weights([(3,)]), 1, timeout_s=T))
    listening = {c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN} - before
    assert listening
    assert {address.ip for address in listening} == {"127.0.0.1"}
    assert "UCX_NET_DEVICES" not in os.environ
    sender.close()


@needs_nixl
@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_sender_that_stops_or_dies_is_a_named_error_and_another_takes_its_place(how: str) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            sender, other = [await stack.enter_async_context(started("sender", n, "nixl")) for n in ("s", "other")]
            first = Manifest.decode(await sender.send(1, T))
            receiver = joined(first)
            if how == "killed":
                assert_same(await receiver.receive_weights(first, timeout_s=T), make_weights(SHAPES, seed=1))
                await sender.finalize(1)
                first = Manifest.decode(await sender.send(2, T))
                await sender.kill()
            else:  # before anybody has connected: once they have, UCX may read a process that does not run
                sender.process.send_signal(signal.SIGSTOP)
            start = time.monotonic()
            with pytest.raises(WeightSyncError, match=r"did not finish within 2 s|A new sync is needed"):
                await receiver.receive_weights(first, timeout_s=2)
            assert time.monotonic() - start < 15
            second = Manifest.decode(await other.send(3, T))
            receiver.init_process_group(type(receiver).build_topology(second.sender, [receiver.prepare()]).receivers[0])
            assert_same(await receiver.receive_weights(second, timeout_s=T), make_weights(SHAPES, seed=3))
            receiver.close()

    asyncio.run(run())
