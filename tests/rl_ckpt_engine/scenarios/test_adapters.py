"""LoRA adapters are sent alone and must have changed; merged weights are read while merged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import pytest
from ckpt_fakes import Sink, Source

from rl_ckpt_engine import CheckpointEngineRegistry, Manifest, ReceiverEndpoint, SenderEndpoint
from rl_ckpt_engine.engines.one_host.naive import NaiveEngine
from rl_ckpt_engine.testing import make_weights
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError
from rl_protocol.ports import WeightCapabilities

T = 120.0
BASE = make_weights([(10, 10)], seed=0)


class AdapterSink(Sink):
    capabilities = WeightCapabilities(adapters=True)

    def __init__(self) -> None:
        super().__init__(BASE)
        self.adapter: dict[str, bytes] = {}

    def load_adapter(self, weights: Iterable[WeightTensor], version: int) -> None:
        self.adapter = {w.name: w.data.tobytes() for w in weights}
        self.weight_version = version


@pytest.mark.parametrize("engine", ["naive", "shm", "tcp", "delta-shm", "delta-tcp"])
def test_an_adapter_goes_alone_and_must_have_changed(engine: str) -> None:
    source, sink = Source(make_weights([(2, 10), (10, 2)], seed=1)), AdapterSink()
    create = CheckpointEngineRegistry().create
    sender, receiver = SenderEndpoint(create(engine), source, kind="lora"), ReceiverEndpoint(create(engine), sink)

    async def sync(version: int) -> None:
        data = (await sender.send(version, T)).manifest
        assert Manifest.decode(data).kind == "lora"
        await receiver.receive(data, T)
        await receiver.activate(version, T)
        await sender.finalize(version)

    async def run() -> None:
        await sync(1)
        with pytest.raises(WeightSyncError, match="version 2 equals that of version 1 bit for bit"):
            await sender.send(2, T)
        source.weights = make_weights([(2, 10), (10, 2)], seed=2)
        await sync(2)

    asyncio.run(run())
    assert sink.adapter == {w.name: w.data.tobytes() for w in source.weights}
    assert sink.loaded == {w.name: w.data.tobytes() for w in BASE}, "the base stays"
    sender.close()
    receiver.close()


def test_a_sink_without_adapters_refuses_and_stays_whole() -> None:
    sender = SenderEndpoint(NaiveEngine(), Source(make_weights([(4,)])), kind="lora")
    receiver = ReceiverEndpoint(NaiveEngine(), Sink(BASE))

    async def run() -> None:
        with pytest.raises(WeightSyncError, match="version 1, an adapter: Sink does not declare adapters"):
            await receiver.receive((await sender.send(1, T)).manifest, T)
        await receiver.resume(T)

    asyncio.run(run())


class Merging:
    """A source whose weights are merged only while its generator runs."""

    capabilities = WeightCapabilities()

    def __init__(self, *, fails: bool) -> None:
        self.merged = False
        self.fails = fails

    def named_weights(self) -> Iterator[WeightTensor]:
        self.merged = True
        try:
            for weight in make_weights([(4,), (5,)]):
                assert self.merged
                yield weight
                if self.fails:
                    raise WeightSyncError("out of memory")
        finally:
            self.merged = False


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("timeout_s", [T, 0.0])
def test_merged_weights_are_read_within_their_context_and_unmerged_whatever_happens(
    fails: bool, timeout_s: float
) -> None:
    source = Merging(fails=fails)
    sender = SenderEndpoint(NaiveEngine(), source)
    if fails or not timeout_s:
        with pytest.raises(WeightSyncError):
            asyncio.run(sender.send(1, timeout_s))
    else:
        asyncio.run(sender.send(1, timeout_s))
    assert not source.merged
