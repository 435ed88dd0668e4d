"""Sinks that compute with received weights in place detect that they were overwritten."""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterable

import msgspec
import numpy as np
import pytest
from ckpt_fakes import Sink, Source, model

from rl_ckpt_engine import CheckpointEngine, CheckpointEngineManager, Manifest, ReceiverEndpoint, SenderEndpoint
from rl_ckpt_engine.engines.base import memfd
from rl_ckpt_engine.engines.base.memfd import PAYLOAD_START, SlotPlacement
from rl_ckpt_engine.engines.delta.delta_engine import delta_over
from rl_ckpt_engine.engines.network.tcp import TcpEngine
from rl_ckpt_engine.engines.one_host.naive import NaiveEngine
from rl_ckpt_engine.engines.one_host.shm import ShmEngine
from rl_ckpt_engine.engines.one_host.shm_copy import ShmCopyEngine
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError
from rl_protocol.ports import WeightCapabilities
from rl_protocol.support.host.portable import uses_linux

linux_only = pytest.mark.skipif(not uses_linux(), reason="only Linux has seals and memory without a name")

T = 120.0


class Borrower(Sink):
    """Keeps references to the weights it adopts."""

    capabilities = WeightCapabilities(adopts=True)

    def __init__(self) -> None:
        super().__init__(model(0))
        self.lent: list[WeightTensor] = []
        self.watch: Callable[[], None] = lambda: None

    def adopt_weights(self, weights: Iterable[WeightTensor], version: int, watch: Callable[[], None]) -> None:
        self.lent, self.watch, self.weight_version = list(weights), watch, version

    def computed(self) -> list[bytes]:
        """Use the weights, check that they are intact, and return the result, as a sink does."""
        result = [weight.data.tobytes() for weight in self.lent]
        self.watch()
        return result


def system(replicas: int) -> tuple[Source, list[Borrower], CheckpointEngineManager]:
    source, sinks = Source(model(1)), [Borrower() for _ in range(replicas)]
    ends = [ReceiverEndpoint(ShmEngine(), sink, name=f"r{number}") for number, sink in enumerate(sinks)]
    return source, sinks, CheckpointEngineManager(SenderEndpoint(ShmEngine(), source), ends)


def bytes_of(seed: int) -> list[bytes]:
    return [weight.data.tobytes() for weight in model(seed)]


def test_all_replicas_use_one_copy_which_the_sender_made(monkeypatch: pytest.MonkeyPatch) -> None:
    source, sinks, manager = system(2)
    copied: list[int] = []
    real = np.copyto

    def counted(target: np.ndarray, data: np.ndarray) -> None:
        copied.append(data.nbytes)
        real(target, data)

    monkeypatch.setattr(memfd.np, "copyto", counted)
    for version in (1, 2, 3, 4):
        source.weights = model(version)
        copied.clear()
        asyncio.run(manager.update_weights(version))
        assert sum(copied) == sum(weight.nbytes for weight in source.weights)
        assert [sink.computed() for sink in sinks] == [bytes_of(version)] * 2
        assert all(sink.loaded == Sink(model(0)).loaded for sink in sinks), "load_weights was not called"
        assert not any(weight.data.flags.writeable for sink in sinks for weight in sink.lent)


@pytest.mark.parametrize("engine", [ShmEngine, ShmCopyEngine, TcpEngine])
def test_a_version_in_use_outlives_the_next_being_sent_received_and_taken_back(engine: type[CheckpointEngine]) -> None:
    source, sink = Source(model(1)), Borrower()
    sender, receiver = SenderEndpoint(engine(), source), ReceiverEndpoint(engine(), sink)

    async def run() -> None:
        for version in (1, 2):
            source.weights = model(version)
            await receiver.receive((await sender.send(version, T)).manifest, T)
            await receiver.activate(version, T)
            await sender.finalize(version)
        for seed in (3, 4):
            source.weights = model(seed)
            await receiver.receive((await sender.send(3, T)).manifest, T)
            assert sink.computed() == bytes_of(2)
            await sender.abort()
            await receiver.resume(T)
            assert sink.computed() == bytes_of(2)

        source.weights = model(5)
        await receiver.receive((await sender.send(3, T)).manifest, T)
        await receiver.activate(3, T)
        assert sink.computed() == bytes_of(5)

    asyncio.run(run())
    sender.close()
    receiver.close()


class Dropper(Borrower):
    """Drops its weights while it sleeps, unless they are not its own."""

    capabilities = WeightCapabilities(adopts=True, sleeps=True, drops_weights=True)

    async def sleep(self, level: int = 1) -> int:
        return 0

    async def wake(self, part: object = None) -> None:
        pass


@pytest.mark.parametrize("engine", [ShmEngine, ShmCopyEngine, TcpEngine])
def test_a_sink_that_drops_its_weights_copies_those_in_a_buffer(engine: type[CheckpointEngine]) -> None:
    source, sink = Source(model(1)), Dropper()
    sender, receiver = SenderEndpoint(engine(), source), ReceiverEndpoint(engine(), sink)

    async def run() -> None:
        await receiver.receive((await sender.send(1, T)).manifest, T)
        await receiver.activate(1, T)

    asyncio.run(run())
    in_place = engine is ShmEngine  # the sender's memory, which no receiver could free
    assert bool(sink.lent) == in_place
    assert (sink.loaded == Sink(model(1)).loaded) == (not in_place)
    sender.close()
    receiver.close()


def test_a_receiver_left_behind_notices_and_catches_up() -> None:
    source, sinks, manager = system(1)
    late = Borrower()
    behind = ReceiverEndpoint(ShmEngine(), late, name="late")

    async def run() -> None:
        await manager.add_receiver(behind)
        await manager.update_weights(1)
        manager.quarantine("late", "it was said to be dead")
        source.weights = model(2)
        await manager.update_weights(2)
        with pytest.raises(WeightSyncError, match="Version 1 is no longer available"):
            late.computed()
        with pytest.raises(WeightSyncError, match="Version 1 is no longer available"):
            await behind.resume(T)
        await manager.add_receiver(behind)
        assert late.computed() == sinks[0].computed() == bytes_of(2)
        await behind.resume(T)

    asyncio.run(run())


def test_weights_in_use_outlive_their_sender() -> None:
    _, (sink,), manager = system(1)
    asyncio.run(manager.update_weights(1))
    manager._sender.close()  # pyright: ignore[reportPrivateUsage]
    assert sink.computed() == bytes_of(1)


def test_in_one_process_the_sink_uses_the_tensors_of_the_source_and_detects_their_change() -> None:
    memory = [weight.data.copy() for weight in model(1)]
    own = [WeightTensor(w.name, w.dtype, w.shape, m) for w, m in zip(model(1), memory, strict=True)]
    source, sink = Source(own), Borrower()
    manager = CheckpointEngineManager(SenderEndpoint(NaiveEngine(), source), [ReceiverEndpoint(NaiveEngine(), sink)])
    asyncio.run(manager.update_weights(1))
    assert all(lent is own for lent, own in zip(sink.lent, source.weights, strict=True))
    assert sink.computed() == bytes_of(1)
    for place, new in zip(memory, model(2), strict=True):
        place[...] = new.data
    with pytest.raises(WeightSyncError, match="digest"):
        sink.computed()
    asyncio.run(manager.update_weights(2))
    assert sink.computed() == bytes_of(2)


def test_an_engine_whose_memory_is_written_during_the_next_sync_is_copied_from() -> None:
    sink = Borrower()
    source = Source(model(1))
    engine = delta_over(TcpEngine)
    manager = CheckpointEngineManager(SenderEndpoint(engine(), source), [ReceiverEndpoint(engine(), sink)])
    asyncio.run(manager.update_weights(1))
    assert sink.lent == []
    assert list(sink.loaded.values()) == bytes_of(1)


def test_only_the_version_received_last_can_be_watched() -> None:
    sender, receiver = ShmEngine(), ShmEngine()
    receiver.init_process_group(ShmEngine.build_topology(sender.prepare(), [receiver.prepare()]).receivers[0])
    first = asyncio.run(sender.send_weights(model(1), 1, timeout_s=T))
    with pytest.raises(WeightSyncError, match="Version 1 was not received here"):
        receiver.watch(first)
    asyncio.run(receiver.receive_weights(first, timeout_s=T))
    watch = receiver.watch(first)
    sender.finalize(1)
    second = asyncio.run(sender.send_weights(model(2), 2, timeout_s=T))
    asyncio.run(receiver.receive_weights(second, timeout_s=T))
    watch()
    sender.finalize(2)
    with pytest.raises(WeightSyncError, match="Version 1 is no longer available"):
        watch()
    sender.close()
    receiver.close()


OTHER_PROCESS = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
for change in (lambda: os.pwrite(fd, b"?", 4096), lambda: mmap.mmap(fd, 8192)):
    try:
        change()
    except PermissionError:
        print("refused")
"""


@linux_only
@pytest.mark.parametrize("lends", [True, False], ids=["adopted", "copied"])
def test_weights_cannot_change_between_verification_and_use(lends: bool) -> None:
    source, sink = Source(model(1)), Borrower() if lends else Sink(model(0))
    sender = ShmEngine()
    sending, receiving = SenderEndpoint(sender, source), ReceiverEndpoint(ShmEngine(), sink)

    def attack(manifest: Manifest) -> None:
        place = msgspec.msgpack.decode(manifest.placement, type=SlotPlacement)
        path = f"/proc/{os.getpid()}/fd/{place.fd}"
        with pytest.raises(PermissionError):
            os.pwrite(place.fd, b"?", PAYLOAD_START)
        with pytest.raises(PermissionError):
            mmap.mmap(place.fd, PAYLOAD_START)
        if manifest.version == 2:
            said = subprocess.run([sys.executable, "-c", OTHER_PROCESS, path], capture_output=True, check=True)
            assert said.stdout.split() == [b"refused"] * 2
        published = sender._sending.versions.pending or sender._sending.versions.committed  # pyright: ignore[reportPrivateUsage]
        assert published is not None
        with pytest.raises(ValueError, match="read-only"):
            published.held._bytes[PAYLOAD_START] ^= 1  # pyright: ignore[reportPrivateUsage]

    async def run() -> None:
        for version in (1, 2, 3, 4):
            source.weights = model(version)
            manifest = (await sending.send(version, T)).manifest
            await receiving.receive(manifest, T)
            attack(Manifest.decode(manifest))
            await receiving.activate(version, T)
            await sending.finalize(version)
            attack(Manifest.decode(manifest))
            got = sink.computed() if isinstance(sink, Borrower) else list(sink.loaded.values())
            assert got == bytes_of(version)

    asyncio.run(run())


def test_tensors_of_one_process_that_change_before_they_are_loaded_are_refused() -> None:
    values = np.arange(12, dtype=np.uint8)
    weights = [WeightTensor("w", "uint8", (12,), values)]
    source, sink = Source(weights), Sink([WeightTensor("w", "uint8", (12,), values * 0)])
    sending, receiving = SenderEndpoint(NaiveEngine(), source), ReceiverEndpoint(NaiveEngine(), sink, name="r0")

    async def run() -> None:
        await receiving.receive((await sending.send(1, T)).manifest, T)
        values[3] ^= 1
        with pytest.raises(WeightSyncError, match="'w' of version 1 arrived damaged"):
            await receiving.activate(1, T)
        assert (sink.weight_version, sink.loaded) == (0, {"w": bytes(12)})
        await sending.abort()
        await receiving.resume(T)
        assert receiving.admitting

    asyncio.run(run())
