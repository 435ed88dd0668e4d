"""One receiver of a host relays a version to the others, between processes."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import msgspec
import pytest
from abandoned_memory import no_memory_left
from ckpt_fakes import Sink, Source, model
from ckpt_remote import RemotePeer, started

from rl_ckpt_engine import CheckpointEngineConfig, CheckpointEngineManager, ReceiverEndpoint, SenderEndpoint
from rl_ckpt_engine.engines.network.tcp import TcpEngine
from rl_ckpt_engine.sync import process_groups
from rl_protocol.errors import WeightSyncError

NAMES = ("one", "two", "three")


@pytest.fixture(autouse=True)
def _relays_small_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "RELAY_BYTES", 1)


class KilledWhenItRelays:
    """Handle of a receiver whose process is killed when it is asked to relay."""

    def __init__(self, peer: RemotePeer) -> None:
        self._peer = peer
        self.name = peer.name

    def __getattr__(self, operation: str):
        return getattr(self._peer, operation)

    async def relay(self, timeout_s: float) -> bytes:
        await self._peer.kill()
        return await self._peer.relay(timeout_s)


def test_processes_of_a_host_get_a_version_from_one_of_them_or_without_it_from_the_sender() -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            sender, *receivers = [
                await stack.enter_async_context(started(role, name, "tcp"))
                for role, name in (("sender", "s"), *(("receiver", name) for name in NAMES))
            ]
            handles = [KilledWhenItRelays(receivers[0]), *receivers[1:]]
            manager = CheckpointEngineManager(sender, receivers, CheckpointEngineConfig(timeout_s=120))
            for version, relayed in ((1, 0), (2, 2), (3, 2)):  # hosts are known after the first
                assert (await manager.update_weights(version)).receivers == NAMES
                assert manager.metrics["weight_sync/relayed"] == relayed
                for receiver in receivers:
                    assert await receiver.has(version)
            doomed = CheckpointEngineManager(sender, handles, CheckpointEngineConfig(timeout_s=120))
            await doomed.update_weights(4)
            report = await doomed.update_weights(5)
            assert report.receivers == NAMES[1:]
            assert list(doomed.quarantined) == ["one"]
            for receiver in receivers[1:]:
                assert await receiver.has(5)

    with no_memory_left():
        asyncio.run(run())


class Receiver(ReceiverEndpoint):
    """A receiver that says which calls it gets, and on which host it is."""

    def __init__(self, name: str, host: str = "") -> None:
        self.sink = Sink(model(0))
        super().__init__(TcpEngine(), self.sink, name=name)
        self.host, self.calls = host, list[str]()

    async def prefetch(self, version: int, timeout_s: float) -> None:
        self.calls.append("prefetch")
        await super().prefetch(version, timeout_s)

    async def receive(self, manifest: bytes, timeout_s: float):
        self.calls.append("receive")
        return msgspec.structs.replace(await super().receive(manifest, timeout_s), host=self.host)

    async def relay(self, timeout_s: float) -> bytes:
        self.calls.append("relay")
        return await super().relay(timeout_s)


def synced(*receivers: Receiver, versions: int = 3) -> CheckpointEngineManager:
    manager = CheckpointEngineManager(SenderEndpoint(TcpEngine(), Source(model(1))), receivers)

    async def run() -> None:
        for version in range(1, versions + 1):
            for receiver in receivers:
                receiver.calls.clear()
            await manager.update_weights(version)

    asyncio.run(run())
    want = {w.name: w.data.tobytes() for w in model(1)}
    assert [receiver.sink.loaded == want for receiver in receivers] == [True] * len(receivers)
    return manager


def closed(*receivers: Receiver) -> list[list[str]]:
    for receiver in receivers:
        receiver.close()
    return [receiver.calls for receiver in receivers]


def test_each_host_has_one_that_relays_and_prefetches() -> None:
    receivers = [Receiver(f"r{i}", host) for i, host in enumerate("aabbaab")]
    manager = synced(*receivers)
    assert manager.metrics["weight_sync/relayed"] == 5
    leads, follows = ["prefetch", "receive", "relay"], ["receive"]
    assert closed(*receivers) == [leads, follows, leads, follows, follows, follows, follows]


@pytest.mark.parametrize("hosts", ["ab", "abcd", ["", "", ""]])
def test_without_neighbors_or_with_an_engine_that_does_not_relay_all_receive_from_the_sender(
    hosts: str | list[str],
) -> None:
    receivers = [Receiver(f"r{i}", host) for i, host in enumerate(hosts)]
    assert synced(*receivers).metrics["weight_sync/relayed"] == 0
    assert closed(*receivers) == [["prefetch", "receive"]] * len(hosts)


def test_a_small_version_is_not_relayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "RELAY_BYTES", 1 + sum(w.nbytes for w in model(1)))
    receivers = [Receiver(f"r{i}", "a") for i in range(3)]
    synced(*receivers)
    assert closed(*receivers) == [["prefetch", "receive"]] * 3


def test_when_the_relay_fails_the_others_receive_from_the_sender() -> None:
    class Full(Receiver):
        async def relay(self, timeout_s: float) -> bytes:
            raise WeightSyncError("no memory left")

    receivers = [Full("r0", "a"), Receiver("r1", "a"), Receiver("r2", "a")]
    manager = synced(*receivers)
    assert (manager.receivers, manager.quarantined) == (("r0", "r1", "r2"), {})
    assert manager.metrics["weight_sync/relayed"] == 0
    closed(*receivers)


def test_a_relay_of_other_weights_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    class Late(Receiver):
        async def relay(self, timeout_s: float) -> bytes:
            relayed, self.before = self.before, await super().relay(timeout_s)
            return relayed or self.before

        before = b""

    receivers = [Late("r0", "a"), Receiver("r1", "a")]
    assert synced(*receivers).metrics["weight_sync/relayed"] == 0
    assert "other weights" in caplog.text
    closed(*receivers)


def test_a_bug_in_one_host_leaves_no_call_of_another_behind() -> None:
    ended: list[str] = []

    class Broken(Receiver):
        async def relay(self, timeout_s: float) -> bytes:
            raise ZeroDivisionError

    class Slow(Receiver):
        async def relay(self, timeout_s: float) -> bytes:
            await asyncio.sleep(0.05)
            ended.append(self.name)
            return await super().relay(timeout_s)

    receivers = [Broken("r0", "a"), Receiver("r1", "a"), Slow("r2", "b"), Receiver("r3", "b")]
    with pytest.raises(ZeroDivisionError):
        synced(*receivers)
    assert ended == ["r2"]
    closed(*receivers)


def test_when_the_leader_does_not_receive_the_others_do() -> None:
    class Fails(Receiver):
        async def receive(self, manifest: bytes, timeout_s: float):
            if self.sink.weight_version == 2:
                raise WeightSyncError("broken")
            return await super().receive(manifest, timeout_s)

    manager = CheckpointEngineManager(
        SenderEndpoint(TcpEngine(), Source(model(1))),
        receivers := [Fails("r0", "a"), Receiver("r1", "a"), Receiver("r2", "a"), Receiver("r3", "a")],
    )

    async def run() -> None:
        for version in range(1, 5):
            await manager.update_weights(version)
            assert manager.metrics["weight_sync/relayed"] == (0, 3, 0, 2)[version - 1]

    asyncio.run(run())
    assert manager.receivers == ("r1", "r2", "r3")
    assert receivers[1].calls.count("relay") == 1, "the next one relays"
    closed(*receivers)
