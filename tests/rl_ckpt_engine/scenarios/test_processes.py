"""Engine `shm` between processes; one test kills the sender."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import pytest
from abandoned_memory import no_memory_left
from ckpt_remote import SHAPES, started

from rl_ckpt_engine import CheckpointEngineConfig, CheckpointEngineManager, Manifest, ReceiverEndpoint
from rl_ckpt_engine.engines.one_host.shm import ShmEngine
from rl_ckpt_engine.testing import assert_same, make_weights
from rl_protocol.errors import WeightSyncError
from rl_protocol.ports import WeightCapabilities


def test_manager_moves_weights_between_processes_and_survives_the_death_of_one() -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            sender, one, two, late = [
                await stack.enter_async_context(started(role, name))
                for role, name in (("sender", "s"), ("receiver", "one"), ("receiver", "two"), ("receiver", "late"))
            ]
            manager = CheckpointEngineManager(sender, [one, two], CheckpointEngineConfig(timeout_s=120))
            for version in (1, 2, 3):
                assert (await manager.update_weights(version)).receivers == ("one", "two")
                assert await one.has(version)
                assert await two.has(version)
            await two.kill()
            assert (await manager.update_weights(4)).receivers == ("one",)
            assert list(manager.quarantined) == ["two"]
            await manager.add_receiver(late)
            assert await late.has(4)
            assert (await manager.update_weights(5)).receivers == ("one", "late")
            assert await late.has(5)
            await sender.kill()
            start = time.monotonic()
            with pytest.raises(WeightSyncError, match="send: the sender failed"):
                await manager.update_weights(6)
            assert time.monotonic() - start < 60
            assert await one.has(5), "old weights stay"

    with no_memory_left():
        asyncio.run(run())


def test_receiver_notices_a_killed_sender() -> None:
    async def run() -> None:
        receiver = ShmEngine()
        async with started("sender", "s") as sender:
            first = Manifest.decode((await sender.send(1, 120)).manifest)
            receiver.init_process_group(ShmEngine.build_topology(first.sender, [receiver.prepare()]).receivers[0])
            got = await receiver.receive_weights(first, timeout_s=120)
            assert_same(got, make_weights(SHAPES, seed=1))
            await sender.finalize(1)
            second = Manifest.decode((await sender.send(2, 120)).manifest)
            await sender.kill()
            for manifest in (first, second):  # one mapped before the kill, one not
                start = time.monotonic()
                with pytest.raises(WeightSyncError, match="the sender died"):
                    await receiver.receive_weights(manifest, timeout_s=120)
                assert time.monotonic() - start < 60
            assert_same(got, make_weights(SHAPES, seed=1))

    asyncio.run(run())


def test_endpoint_of_another_process_joins_by_the_manifest_alone() -> None:
    class Loaded:
        capabilities = WeightCapabilities()
        weight_version = 0

        def load_weights(self, weights: object, version: int) -> None:
            self.weight_version = version
            assert_same(list(weights), make_weights(SHAPES, seed=1))

    async def run() -> None:
        receiver = ReceiverEndpoint(ShmEngine(), Loaded())
        async with started("sender", "s") as sender:
            await receiver.receive((await sender.send(1, 120)).manifest, 120)
            assert await receiver.activate(1, 120) == 1

    asyncio.run(run())
