"""Processes killed with SIGKILL in every phase, for every engine that connects processes."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from abandoned_memory import no_memory_left
from ckpt_remote import RemotePeer, loads, started

from rl_ckpt_engine import CheckpointEngineConfig, CheckpointEngineManager
from rl_protocol.errors import WeightSyncError

pytestmark = pytest.mark.slow
PREFETCHING = ["shm-copy", "tcp"]
ENGINES = [
    "shm",
    *PREFETCHING,
    "disk",
    "cuda_ipc",
    pytest.param("nixl", marks=pytest.mark.skipif(not loads("nixl_cu12", "nixl_cu13"), reason="NIXL is not installed")),
    pytest.param(
        "mooncake", marks=pytest.mark.skipif(not loads("mooncake.engine"), reason="Mooncake is not installed")
    ),
]
HURRIED = CheckpointEngineConfig(timeout_s=120)


@pytest.fixture(autouse=True)
def operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declare the network as trusted, which `mooncake` requires."""
    monkeypatch.setenv("RL_CKPT_TRUSTED_NETWORK", "1")


class Doomed:
    """A handle that kills its process during the call of `phase`.

    If the process answers before it is killed, the answer is discarded.
    """

    def __init__(self, peer: RemotePeer) -> None:
        self._peer = peer
        self.phase = ""
        self.name = peer.name

    def __getattr__(self, method: str):
        async def call(*args: object) -> object:
            running = asyncio.ensure_future(getattr(self._peer, method)(*args))
            if method == self.phase:
                await asyncio.sleep(0)
                self._peer.process.kill()
                await running
                raise ConnectionResetError(f"process {self.name} is gone")
            return await running

        return call


@pytest.mark.parametrize("engine", ENGINES)
def test_a_receiver_killed_in_any_phase_is_named_and_the_other_serves(engine: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            sender, good, bad = [
                await enter(started(role, name, engine, tmp_path))
                for role, name in (("sender", "s"), ("receiver", "good"), ("receiver", "bad"))
            ]
            doomed = Doomed(bad)
            manager = CheckpointEngineManager(sender, [good, doomed], HURRIED)
            phases = ["receive", "activate", *(["prefetch"] if engine in PREFETCHING else [])]
            for version, phase in enumerate(phases, start=1):
                doomed.phase = phase
                report = await manager.update_weights(version)
                assert report.receivers == ("good",), phase
                assert list(manager.quarantined) == ["bad"], phase
                assert f"{phase}: bad" in manager.quarantined["bad"]
                assert await good.has(version), phase
                again = await enter(started("receiver", "bad", engine, tmp_path))
                doomed = Doomed(again)
                await manager.add_receiver(doomed)
                assert await again.has(version), f"who comes back after {phase} has the current version"
            last = len(phases) + 1
            assert (await manager.update_weights(last)).receivers == ("good", "bad")
            assert await good.has(last)
            assert await again.has(last)

    with no_memory_left():
        asyncio.run(run())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sender_killed_in_any_phase_leaves_whole_versions(engine: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            doomed, next_one, last, one = [
                await stack.enter_async_context(started(role, name, engine, tmp_path))
                for role, name in (("sender", "s"), ("sender", "s2"), ("sender", "s3"), ("receiver", "one"))
            ]
            sender = Doomed(doomed)
            sender.phase = "send"
            with pytest.raises(WeightSyncError, match="send: the sender failed"):
                await CheckpointEngineManager(sender, [one], HURRIED).update_weights(1)
            assert (await one.loaded())[0] == 0
            sender = Doomed(next_one)
            manager = CheckpointEngineManager(sender, [one], HURRIED)
            assert (await manager.update_weights(2)).receivers == ("one",)
            assert await one.has(2)
            sender.phase = "finalize"
            assert (await manager.update_weights(3)).receivers == ("one",)
            assert await one.has(3)
            assert (await CheckpointEngineManager(last, [one], HURRIED).update_weights(4)).receivers == ("one",)
            assert await one.has(4)

    asyncio.run(run())


@pytest.mark.parametrize("engine", PREFETCHING)
def test_a_sender_killed_while_receivers_prefetch_leaves_the_old_weights(engine: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            doomed, next_one, one = [
                await stack.enter_async_context(started(role, name, engine, tmp_path))
                for role, name in (("sender", "s"), ("sender", "s2"), ("receiver", "one"))
            ]
            sender = Doomed(doomed)
            manager = CheckpointEngineManager(sender, [one], HURRIED)
            for version in (1, 2, 3):
                await manager.update_weights(version)
            assert manager.metrics["weight_sync/prefetched_bytes"] > 0
            sender.phase = "send"
            with pytest.raises(WeightSyncError, match="send: the sender failed"):
                await manager.update_weights(4)
            assert await one.has(3)
            manager = CheckpointEngineManager(next_one, [one], HURRIED)
            for version in (5, 6, 7):
                await manager.update_weights(version)
                assert await one.has(version)

    with no_memory_left():
        asyncio.run(run())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_late_joiner_is_served_from_a_replica_when_the_sender_is_dead(engine: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            sender, one, late, later = [
                await stack.enter_async_context(started(role, name, engine, tmp_path))
                for role, name in (("sender", "s"), ("receiver", "one"), ("receiver", "late"), ("receiver", "later"))
            ]
            manager = CheckpointEngineManager(sender, [one], HURRIED)
            await manager.update_weights(1)
            await sender.kill()
            await manager.add_receiver(late)
            assert await late.has(1)
            await one.kill()
            await manager.add_receiver(later)
            assert await later.has(1), "from a replica that was itself served by a replica"

    asyncio.run(run())
