"""Process groups of engine `gloo` between processes: creation, reuse, failure, recovery."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import pytest
from ckpt_fakes import Sink, Source, model
from ckpt_remote import RemotePeer, started

from rl_ckpt_engine import CheckpointEngineConfig, CheckpointEngineManager, ReceiverEndpoint, SenderEndpoint
from rl_ckpt_engine.engines.delta.delta_engine import delta_over
from rl_ckpt_engine.engines.network.torch_group import GlooEngine
from rl_protocol.errors import WeightSyncError

PATIENT = CheckpointEngineConfig(timeout_s=300)  # four processes import torch


class DiesReceiving:
    """Kills its process when `receive` is called."""

    def __init__(self, peer: RemotePeer) -> None:
        self._peer = peer
        self.name = peer.name

    def __getattr__(self, method: str):
        return getattr(self._peer, method)

    async def prepare(self) -> bytes:
        return await self._peer.prepare()

    async def join(self, member: bytes, timeout_s: float) -> None:
        await self._peer.join(member, timeout_s)

    async def receive(self, manifest: bytes, timeout_s: float) -> object:
        running = asyncio.ensure_future(self._peer.receive(manifest, timeout_s))
        await asyncio.sleep(0)
        self._peer.process.kill()
        return await running


@pytest.mark.parametrize("engine", ["gloo", pytest.param("delta-gloo", marks=pytest.mark.slow)])
def test_a_group_loses_a_member_and_takes_in_another(engine: str) -> None:
    made = GlooEngine if engine == "gloo" else delta_over(GlooEngine)

    async def run() -> None:
        async with AsyncExitStack() as stack:
            peers = await asyncio.gather(
                *(
                    stack.enter_async_context(started(role, name, engine))
                    for role, name in (("sender", "s"), ("receiver", "one"), ("receiver", "two"), ("receiver", "late"))
                )
            )
            sender, one, two, late = peers
            manager = CheckpointEngineManager(sender, [one, DiesReceiving(two)], PATIENT, made)
            report = await manager.update_weights(1)
            assert report.receivers == ("one",), manager.quarantined
            assert list(manager.quarantined) == ["two"]
            assert await one.has(1)
            # with a delta engine, only the changes
            assert (await manager.update_weights(2)).receivers == ("one",)
            await manager.add_receiver(late)
            assert await late.has(2)
            for version in (3, 4):
                assert (await manager.update_weights(version)).receivers == ("one", "late")
                assert await one.has(version)
                assert await late.has(version)
            await sender.kill()
            with pytest.raises(WeightSyncError, match="send: the sender failed"):
                await manager.update_weights(5)
            assert await one.has(4)

    asyncio.run(run())


def test_a_group_is_kept_while_its_members_stay_and_one_damaged_receiver_falls_out() -> None:
    source, sinks = Source(model(1)), [Sink(model(0)) for _ in range(2)]
    sender = SenderEndpoint(GlooEngine(), source)
    receivers = [ReceiverEndpoint(GlooEngine(), sink, name=f"r{i}") for i, sink in enumerate(sinks)]
    joined: list[str] = []
    for receiver in receivers:

        async def join(member: bytes, timeout_s: float, receiver: ReceiverEndpoint = receiver) -> None:
            joined.append(receiver.name)
            await ReceiverEndpoint.join(receiver, member, timeout_s)

        receiver.join = join
    manager = CheckpointEngineManager(sender, receivers, PATIENT, GlooEngine)

    async def run() -> None:
        for version in (1, 2, 3):
            source.weights = model(version)
            await manager.update_weights(version)
            assert all(s.loaded == {w.name: w.data.tobytes() for w in model(version)} for s in sinks)
        assert sorted(joined) == ["r0", "r1"], "one group for three syncs"

        async def refuse(manifest: bytes, timeout_s: float) -> object:
            await ReceiverEndpoint.receive(receivers[1], manifest, timeout_s)
            raise WeightSyncError("a bit flipped here")

        receivers[1].receive = refuse
        source.weights = model(4)
        assert (await manager.update_weights(4)).receivers == ("r0",)
        assert "a bit flipped" in manager.quarantined["r1"]

    asyncio.run(run())
    for end in (sender, *receivers):
        end.close()


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_a_member_that_does_not_come_is_a_deadline(who: str) -> None:
    sender, receiver = GlooEngine(), GlooEngine()
    topology = GlooEngine.build_topology(sender.prepare(), [receiver.prepare()])
    manifest = asyncio.run(sender.send_weights(model(1), 1, timeout_s=60))

    async def alone() -> None:
        if who == "sender":
            sender.init_process_group(topology.sender)
            await sender.join(timeout_s=0.5)
            await sender.serve(manifest, timeout_s=0.5)
        else:
            receiver.init_process_group(topology.receivers[0])
            await receiver.join(timeout_s=0.5)
            await receiver.receive_weights(manifest, timeout_s=0.5)

    start = time.monotonic()
    try:
        with pytest.raises(WeightSyncError):
            asyncio.run(alone())
        assert time.monotonic() - start < 60
    finally:
        sender.close()
        receiver.close()
