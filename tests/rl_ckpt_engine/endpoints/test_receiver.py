"""ReceiverEndpoint: activation, admission of requests, and refused versions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import ClassVar

import msgspec
import pytest
from ckpt_fakes import Sink, Source, model

from rl_ckpt_engine import Capabilities, Manifest, ReceiverEndpoint, SenderEndpoint
from rl_ckpt_engine.engines.one_host.naive import NaiveEngine
from rl_ckpt_engine.engines.one_host.shm import ShmEngine
from rl_ckpt_engine.testing import make_weights
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import ConfigError, WeightSyncError
from rl_protocol.ports import WeightCapabilities

ENGINES = [NaiveEngine, ShmEngine]
T = 120.0


def pair(engine: type[NaiveEngine] | type[ShmEngine], sink: Sink | None = None):
    source, sink = Source(model(1)), sink or Sink(model(0))
    return source, sink, SenderEndpoint(engine(), source), ReceiverEndpoint(engine(), sink, name="r0")


@pytest.mark.parametrize("engine", ENGINES)
def test_received_weights_become_active_only_by_activation(engine: type[NaiveEngine]) -> None:
    source, sink, sender, receiver = pair(engine)

    async def run() -> None:
        data = (await sender.send(1, T)).manifest
        ack = await receiver.receive(data, T)
        assert (ack.version, ack.digest) == (1, Manifest.decode(data).digest)
        assert ack.seconds >= 0
        assert sink.weight_version == 0
        assert await receiver.activate(1, T) == 1
        await sender.finalize(1)

    asyncio.run(run())
    assert sink.weight_version == 1
    assert sink.loaded == {w.name: w.data.tobytes() for w in source.weights}
    sender.close()
    receiver.close()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("weights", "wrong"),
    [
        (model(1)[:-1], "w3"),
        ([*model(1)[:-1], *make_weights([(0,)] * 3 + [(129,)], dtype="int32")[3:]], "w3"),
        ([*model(1), WeightTensor("extra", "uint8", (0,), make_weights([(0,)])[0].data)], "extra"),
    ],
    ids=["missing tensor", "wrong dtype", "unknown tensor"],
)
def test_weights_that_do_not_fit_leave_the_old_ones(
    engine: type[NaiveEngine], weights: list[WeightTensor], wrong: str
) -> None:
    source, sink, sender, receiver = pair(engine)
    before = sink.loaded
    source.weights = weights

    async def run() -> None:
        await receiver.pause(T)
        await receiver.receive((await sender.send(1, T)).manifest, T)
        with pytest.raises(WeightSyncError, match=wrong):
            await receiver.activate(1, T)
        await receiver.resume(T)

    asyncio.run(run())
    assert receiver.admitting
    assert sink.loaded is before
    assert sink.weight_version == 0


def test_changed_weights_are_noticed_by_the_digest() -> None:
    """The trainer changes its tensors in place after engine `naive` has sent references to them."""
    weights = make_weights([(8,)])
    memory = weights[0].data.copy()
    source = Source([WeightTensor("w0", "float32", (8,), memory)])
    sender, receiver = SenderEndpoint(NaiveEngine(), source), ReceiverEndpoint(NaiveEngine(), Sink(weights))

    async def run() -> None:
        data = (await sender.send(1, T)).manifest
        memory[3] ^= 1
        with pytest.raises(WeightSyncError, match="'w0' of version 1 arrived damaged"):
            await receiver.receive(data, T)
        with pytest.raises(WeightSyncError, match="received nothing"):
            await receiver.activate(1, T)

    asyncio.run(run())


def test_receiver_refuses_other_engines_older_versions_and_versions_it_has_not() -> None:
    _, sink, sender, receiver = pair(ShmEngine)
    other = SenderEndpoint(NaiveEngine(), Source(model(1)))

    async def run() -> None:
        with pytest.raises(WeightSyncError, match="receives with engine 'shm', the sender sent with 'naive'"):
            await receiver.receive((await other.send(1, T)).manifest, T)
        data = (await sender.send(1, T)).manifest
        sink.weight_version = 2
        with pytest.raises(WeightSyncError, match="older version 1 is refused"):
            await receiver.receive(data, T)
        sink.weight_version = 1
        await receiver.receive(data, T)
        with pytest.raises(WeightSyncError, match="can't activate version 5: it has received version 1"):
            await receiver.activate(5, T)
        with pytest.raises(WeightSyncError, match="no weight manifest"):
            await receiver.receive(data[:40], T)

    asyncio.run(run())


class SlowSink(Sink):
    """Runs `meanwhile` during a load; the test drops the sender's version there."""

    def __init__(self) -> None:
        super().__init__(model(0))
        self.meanwhile = lambda: None

    def load_weights(self, weights: Iterable[WeightTensor], version: int) -> None:
        super().load_weights(weights, version)
        self.meanwhile()


def test_a_load_that_was_overtaken_closes_admission_until_a_sync_succeeds() -> None:
    sink = SlowSink()
    engine = ShmEngine()
    sender, receiver = SenderEndpoint(engine, Source(model(1))), ReceiverEndpoint(ShmEngine(), sink)
    sink.meanwhile = engine.abort

    async def run() -> None:
        await receiver.pause(T)
        await receiver.receive((await sender.send(1, T)).manifest, T)
        with pytest.raises(WeightSyncError, match="was loading version 1"):
            await receiver.activate(1, T)
        with pytest.raises(WeightSyncError, match="two versions"):
            await receiver.resume(T)
        assert not receiver.admitting
        sink.meanwhile = lambda: None
        await receiver.receive((await sender.send(2, T)).manifest, T)
        await receiver.activate(2, T)
        await receiver.resume(T)

    asyncio.run(run())
    assert receiver.admitting


@pytest.mark.parametrize("engine", ENGINES)
def test_a_version_given_up_before_loading_leaves_the_old_weights(engine: type[NaiveEngine]) -> None:
    _, sink, sender, receiver = pair(engine)
    before = sink.loaded

    async def run() -> None:
        await receiver.pause(T)
        await receiver.receive((await sender.send(1, T)).manifest, T)
        await sender.abort()
        with pytest.raises(WeightSyncError, match="no longer available"):
            await receiver.activate(1, T)
        await receiver.resume(T)

    asyncio.run(run())
    assert sink.loaded is before
    assert sink.weight_version == 0


def test_a_load_that_crashes_closes_admission() -> None:
    sink = SlowSink()
    sender, receiver = SenderEndpoint(NaiveEngine(), Source(model(1))), ReceiverEndpoint(NaiveEngine(), sink)

    def crash() -> None:
        raise RuntimeError("out of memory")

    sink.meanwhile = crash

    async def run() -> None:
        await receiver.receive((await sender.send(1, T)).manifest, T)
        with pytest.raises(RuntimeError):
            await receiver.activate(1, T)
        with pytest.raises(WeightSyncError, match="two versions"):
            await receiver.resume(T)

    asyncio.run(run())


def test_a_sink_that_reports_another_version_is_an_error() -> None:
    sink = SlowSink()
    sender, receiver = SenderEndpoint(NaiveEngine(), Source(model(1))), ReceiverEndpoint(NaiveEngine(), sink)

    def forget() -> None:
        sink.weight_version = 0

    sink.meanwhile = forget

    async def run() -> None:
        await receiver.receive((await sender.send(1, T)).manifest, T)
        with pytest.raises(WeightSyncError, match="reports version 0"):
            await receiver.activate(1, T)

    asyncio.run(run())


def test_engines_that_can_not_be_brought_together_are_refused() -> None:
    class Fixed(NaiveEngine):
        capabilities: ClassVar[Capabilities] = Capabilities(
            same_host_only=False, zero_copy=False, elastic=False, devices=("cpu",)
        )

    with pytest.raises(ConfigError, match="declares elastic=False but has no method 'join'"):
        SenderEndpoint(Fixed(), Source(model(1)))
    with pytest.raises(ConfigError, match="declares elastic=False but has no method 'join'"):
        ReceiverEndpoint(Fixed(), Sink(model(0)))


@pytest.mark.parametrize(
    ("declared", "missing"),
    [("adapters", "load_adapter"), ("adopts", "adopt_weights"), ("pauses", "pause"), ("sleeps", "sleep")],
)
def test_a_sink_without_the_methods_that_it_declares_is_refused(declared: str, missing: str) -> None:
    sink = Sink(model(0))
    sink.capabilities = WeightCapabilities(**{declared: True})
    with pytest.raises(ConfigError, match=f"Sink declares {declared} but has no method '{missing}'"):
        ReceiverEndpoint(NaiveEngine(), sink)


def test_a_source_or_sink_must_declare_its_capabilities() -> None:
    source, sink = Source(model(1)), Sink(model(0))
    source.capabilities = sink.capabilities = None
    with pytest.raises(ConfigError, match=r"Source\.capabilities must be a WeightCapabilities; got None"):
        SenderEndpoint(NaiveEngine(), source)
    with pytest.raises(ConfigError, match=r"Sink\.capabilities must be a WeightCapabilities; got None"):
        ReceiverEndpoint(NaiveEngine(), sink)


class Undeclared(Sink):
    """Has all optional methods, and declares none."""

    load_adapter = adopt_weights = pause = resume = sleep = wake = property(lambda _: pytest.fail("was called"))


def test_methods_that_a_sink_does_not_declare_are_not_called() -> None:
    _, sink, sender, receiver = pair(NaiveEngine, Undeclared(model(0)))

    async def run() -> None:
        await receiver.pause(T)
        await receiver.receive((await sender.send(1, T)).manifest, T)
        await receiver.activate(1, T)
        await receiver.resume(T)

    asyncio.run(run())
    assert sink.loaded == {w.name: w.data.tobytes() for w in model(1)}


def test_engine_naive_refuses_another_process() -> None:
    mine = NaiveEngine().prepare()
    theirs = msgspec.msgpack.encode({**msgspec.msgpack.decode(mine), "pid": 1})
    with pytest.raises(WeightSyncError, match="within one process"):
        NaiveEngine.build_topology(mine, [theirs])


def test_resuming_what_was_never_paused_changes_nothing() -> None:
    *_, receiver = pair(NaiveEngine)
    asyncio.run(receiver.resume(T))
    assert receiver.admitting
    asyncio.run(receiver.pause(T))
    asyncio.run(receiver.resume(T))
    asyncio.run(receiver.resume(T))
    assert receiver.admitting


class OneAtATime(NaiveEngine):
    """Its first call hangs until it is cancelled; counts the calls that run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.running = self.most = 0
        self.begun = asyncio.Event()

    async def receive_weights(self, manifest: Manifest, *, timeout_s: float) -> list[WeightTensor]:
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        self.begun.set()
        try:
            if self.calls == 1:
                await asyncio.Event().wait()
            return await super().receive_weights(manifest, timeout_s=timeout_s)
        finally:
            self.running -= 1


def test_a_call_whose_caller_is_gone_is_stopped_by_the_next_one() -> None:
    engine, sink = OneAtATime(), Sink(model(0))
    sender, receiver = SenderEndpoint(NaiveEngine(), Source(model(1))), ReceiverEndpoint(engine, sink, name="r0")

    async def run() -> None:
        data = (await sender.send(1, T)).manifest
        left = asyncio.create_task(receiver.receive(data, T))
        await engine.begun.wait()
        await receiver.receive(data, T)
        with pytest.raises(WeightSyncError, match="a later call stopped this one"):
            await asyncio.wait_for(left, T)
        assert await receiver.activate(1, T) == 1

    asyncio.run(run())
    assert (engine.most, sink.weight_version) == (1, 1)
    sender.close()
    receiver.close()


def test_a_cancelled_receive_is_cancelled_and_leaves_room_for_the_next_one() -> None:
    engine = OneAtATime()
    sender, receiver = SenderEndpoint(NaiveEngine(), Source(model(1))), ReceiverEndpoint(engine, Sink(model(0)))

    async def run() -> None:
        data = (await sender.send(1, T)).manifest
        left = asyncio.create_task(receiver.receive(data, T))
        await engine.begun.wait()
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert engine.running == 0
        assert (await receiver.receive(data, T)).version == 1

    asyncio.run(run())
    sender.close()
    receiver.close()
