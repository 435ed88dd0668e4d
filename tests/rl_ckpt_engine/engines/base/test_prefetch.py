"""Receivers prefetch a version while its sender writes it, and only what they will need."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from ckpt_fakes import Sink, Source
from ckpt_pair import T

from rl_ckpt_engine import (
    CheckpointEngineConfig,
    CheckpointEngineManager,
    Manifest,
    ReceiveAck,
    ReceiverEndpoint,
    SenderEndpoint,
)
from rl_ckpt_engine.engines.base.memfd import PAYLOAD_START
from rl_ckpt_engine.engines.base.publishing_engine import PublishingEngine
from rl_ckpt_engine.engines.network.tcp import TcpEngine
from rl_ckpt_engine.engines.one_host.shm_copy import ShmCopyEngine
from rl_ckpt_engine.testing import assert_same, make_weights
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError, WorkerError

ENGINES = [ShmCopyEngine, TcpEngine]
MIB = 1 << 20
SHAPES = [(17 * MIB,), (17 * MIB,), (100,)]


def joined(engine: type[PublishingEngine]) -> tuple[PublishingEngine, PublishingEngine]:
    """A sender and a receiver that hold version 2 of the weights."""
    sender, receiver = engine(), engine()
    receiver.init_process_group(engine.build_topology(sender.prepare(), [receiver.prepare()]).receivers[0])
    for version in (1, 2):
        manifest = asyncio.run(sender.send_weights(weights(version), version, timeout_s=T))
        asyncio.run(receiver.receive_weights(manifest, timeout_s=T))
        sender.finalize(version)
    return sender, receiver


def weights(seed: int) -> list[WeightTensor]:
    return make_weights(SHAPES, dtype="uint8", seed=seed)


def prefetched(receiver: PublishingEngine) -> set[str]:
    return set(receiver._buffers.current._prefetched)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_tensors_arrive_before_the_last_one_exists(engine: type[PublishingEngine]) -> None:
    sender, receiver = joined(engine)
    want = weights(3)

    def exported() -> Iterator[WeightTensor]:
        yield from want[:2]
        end = time.monotonic() + T
        while "w0" not in prefetched(receiver):  # in the thread of the sender
            assert time.monotonic() < end, "nothing was prefetched"
            time.sleep(0.001)
        yield want[2]

    async def received() -> list[WeightTensor]:
        await receiver.prefetch(3, timeout_s=T)
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(lambda: asyncio.run(sender.send_weights(exported(), 3, timeout_s=T)))
            manifest = await asyncio.wrap_future(sending)
        return await receiver.receive_weights(manifest, timeout_s=T)

    assert_same(asyncio.run(received()), want)
    assert receiver.prefetched_nbytes >= want[0].nbytes
    sender.close()
    receiver.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_what_was_damaged_on_its_way_is_received_again(engine: type[PublishingEngine]) -> None:
    sender, receiver = joined(engine)
    want = weights(3)
    at = PAYLOAD_START + 5

    def flip() -> None:
        filling = sender._sending.newest
        assert filling is not None
        memory = filling._bytes
        writable, memory.flags.writeable = memory.flags.writeable, True
        memory[at] ^= 1
        memory.flags.writeable = writable

    async def received() -> list[WeightTensor]:
        manifest = await sender.send_weights(want, 3, timeout_s=T)
        flip()
        await receiver.prefetch(3, timeout_s=T)
        assert receiver._prefetch is not None
        await asyncio.wait({receiver._prefetch._task}, timeout=T)
        assert prefetched(receiver) == {"w0", "w1", "w2"}
        flip()
        return await receiver.receive_weights(manifest, timeout_s=T)

    assert_same(asyncio.run(received()), want)
    assert receiver.prefetched_nbytes == want[1].nbytes + want[2].nbytes
    sender.close()
    receiver.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_frozen_weights_are_not_prefetched(engine: type[PublishingEngine]) -> None:
    sender, receiver = joined(engine)
    frozen, trained = weights(2), weights(9)

    async def sync(version: int, sent: list[WeightTensor]) -> int:
        await receiver.prefetch(version, timeout_s=T)
        manifest = await sender.send_weights(sent, version, timeout_s=T)
        assert_same(await receiver.receive_weights(manifest, timeout_s=T), sent)
        sender.finalize(version)
        return receiver.prefetched_nbytes

    one, other = [frozen[0], frozen[1], trained[2]], frozen
    everything = sum(weight.nbytes for weight in frozen)
    assert asyncio.run(sync(3, one)) == everything, "all tensors changed from version 1 to 2"
    assert asyncio.run(sync(4, other)) == 100, "only w2 changed from version 2 to 3"
    sender.close()
    receiver.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_prefetch_ends_with_its_sender_its_deadline_or_the_engine(
    engine: type[PublishingEngine], caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver = joined(engine)

    async def ended(timeout_s: float) -> None:
        await receiver.prefetch(3, timeout_s=timeout_s)
        assert receiver._prefetch is not None
        await asyncio.wait({receiver._prefetch._task}, timeout=T)
        assert receiver._prefetch.done

    with caplog.at_level(logging.DEBUG):
        asyncio.run(ended(0.05))
    assert "Prefetching version 3" in caplog.text

    async def closed() -> None:
        await receiver.prefetch(3, timeout_s=T)
        prefetch = receiver._prefetch
        assert prefetch is not None
        await asyncio.sleep(0.01)
        assert not prefetch.done
        sender.close()
        receiver.close()
        await asyncio.wait({prefetch._task}, timeout=T)
        assert prefetch.done

    asyncio.run(closed())


def test_a_sender_answers_only_for_what_it_has_written() -> None:
    sender, _ = joined(TcpEngine)
    newest = sender._sending.newest
    assert newest is not None
    whole = sum(weight.nbytes for weight in weights(2))
    assert newest.written(2, 0, whole) is not None
    assert newest.written(3, 0, 1) is None
    sender.abort()
    newest.begin(3)
    assert newest.written(2, 0, 1) is None
    newest.advance(64)
    assert newest.written(3, 0, 64) is not None
    assert newest.written(3, 1, 64) is None
    newest.withdraw()
    assert newest.written(3, 0, 64) is None
    sender.close()


class Prefetching(ReceiverEndpoint):
    """Counts calls; `fault` is raised by `prefetch`."""

    def __init__(self, engine: PublishingEngine, name: str) -> None:
        self.sink = Sink(make_weights([(3,)]))
        super().__init__(engine, self.sink, name=name)
        self.calls: list[str] = []
        self.fault: BaseException | None = None

    async def prefetch(self, version: int, timeout_s: float) -> None:
        self.calls.append(f"prefetch {version}")
        if self.fault is not None:
            raise self.fault
        await super().prefetch(version, timeout_s)

    async def receive(self, manifest: bytes, timeout_s: float) -> ReceiveAck:
        self.calls.append(f"receive {Manifest.decode(manifest).version}")
        return await super().receive(manifest, timeout_s)


def test_a_sync_lets_those_prefetch_that_have_received_before() -> None:
    async def run() -> None:
        source = Source(make_weights([(3,)], seed=1))
        one, late = (Prefetching(ShmCopyEngine(), name) for name in ("one", "late"))
        manager = CheckpointEngineManager(SenderEndpoint(ShmCopyEngine(), source), [one])
        for version in (1, 2, 3):
            source.weights = make_weights([(3,)], seed=version)
            await manager.update_weights(version)
        assert one.calls == ["receive 1", "prefetch 2", "receive 2", "prefetch 3", "receive 3"]
        assert manager.metrics["weight_sync/prefetched_bytes"] == 12
        await manager.add_receiver(late)
        assert late.calls == ["receive 3"]
        one.fault = WorkerError("gone")
        source.weights = make_weights([(3,)], seed=4)
        report = await manager.update_weights(4)
        assert report.receivers == ("late",)
        assert manager.quarantined == {"one": "prefetch: one failed: gone"}
        assert one.calls[-1] == "prefetch 4", "it is not asked to receive"
        assert late.calls[-2:] == ["prefetch 4", "receive 4"]
        assert late.sink.loaded == {"w0": source.weights[0].data.tobytes()}

    asyncio.run(run())


def test_when_no_replica_answers_a_prefetch_all_resume() -> None:
    async def run() -> None:
        source = Source(make_weights([(3,)], seed=1))
        both = [Prefetching(ShmCopyEngine(), name) for name in ("one", "two")]
        manager = CheckpointEngineManager(SenderEndpoint(ShmCopyEngine(), source), both)
        await manager.update_weights(1)
        for receiver in both:
            receiver.fault = WorkerError("busy")
        with pytest.raises(WeightSyncError, match=r"prefetch: one failed: busy\. prefetch: two failed: busy\."):
            await manager.update_weights(2)
        assert not manager.quarantined
        for receiver in both:
            receiver.fault = None
            assert receiver.admitting
            assert receiver.sink.weight_version == 1
        assert (await manager.update_weights(2)).receivers == ("one", "two")

    asyncio.run(run())


def test_nothing_is_prefetched_if_it_is_turned_off() -> None:
    async def run() -> None:
        source, one = Source(make_weights([(3,)], seed=1)), Prefetching(ShmCopyEngine(), "one")
        config = CheckpointEngineConfig(prefetch=False)
        manager = CheckpointEngineManager(SenderEndpoint(ShmCopyEngine(), source), [one], config)
        for version in (1, 2):
            await manager.update_weights(version)
        assert one.calls == ["receive 1", "receive 2"]
        assert manager.metrics["weight_sync/prefetched_bytes"] == 0

    asyncio.run(run())


def test_a_bug_in_a_prefetch_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = joined(ShmCopyEngine)

    async def run() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(receiver, "_pull_ahead", None)
            await receiver.prefetch(3, timeout_s=T)
            await asyncio.sleep(0)
            manifest = await sender.send_weights(weights(3), 3, timeout_s=T)
            with pytest.raises(TypeError):
                await receiver.receive_weights(manifest, timeout_s=T)
        assert_same(await receiver.receive_weights(manifest, timeout_s=T), weights(3))

    asyncio.run(run())


def test_only_engines_that_declare_it_prefetch() -> None:
    from rl_ckpt_engine.engines.one_host.shm import ShmEngine

    with pytest.raises(WeightSyncError, match="'shm' receives nothing before its manifest"):
        asyncio.run(ShmEngine().prefetch(1, timeout_s=T))
