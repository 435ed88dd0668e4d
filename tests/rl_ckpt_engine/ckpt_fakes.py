"""Sources, sinks and faulty handles for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from rl_ckpt_engine import CheckpointEngineConfig, CheckpointEngineManager, ReceiverEndpoint, SendAck, SenderEndpoint
from rl_ckpt_engine.engines.one_host.naive import NaiveEngine
from rl_ckpt_engine.testing import make_weights
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError
from rl_protocol.ports import WeightCapabilities


class Source:
    """A model whose weights can be replaced."""

    capabilities = WeightCapabilities()

    def __init__(self, weights: Sequence[WeightTensor]) -> None:
        self.weights = list(weights)

    def named_weights(self) -> Iterable[WeightTensor]:
        return iter(self.weights)


class Sink:
    """An engine that checks names, dtypes and shapes, and loads all weights or none."""

    capabilities = WeightCapabilities()

    def __init__(self, model: Sequence[WeightTensor]) -> None:
        self._want = {w.name: (w.dtype, w.shape) for w in model}
        self.loaded = {w.name: w.data.tobytes() for w in model}
        self.weight_version = 0

    def load_weights(self, weights: Iterable[WeightTensor], version: int) -> None:
        given = list(weights)
        got = {w.name: (w.dtype, w.shape) for w in given}
        if got != self._want:
            wrong = sorted(name for name in {*got, *self._want} if got.get(name) != self._want.get(name))
            raise WeightSyncError(f"weights do not fit the model: {', '.join(wrong)}")
        self.loaded = {w.name: w.data.tobytes() for w in given}
        self.weight_version = version


SHAPES = [(3, 4), (), (0,), (129,)]


def model(seed: int) -> list[WeightTensor]:
    return make_weights(SHAPES, seed=seed)


class Fault:
    """A handle's fault in one phase: it raises, or never answers."""

    HANG = "hang"

    def __init__(self, **phases: BaseException | str) -> None:
        self.phases = phases

    async def strike(self, phase: str) -> None:
        fault = self.phases.get(phase)
        if fault == self.HANG:
            await asyncio.Event().wait()
        elif isinstance(fault, BaseException):
            raise fault


class FaultySender(SenderEndpoint):
    def __init__(self, source: Source, fault: Fault | None = None) -> None:
        super().__init__(NaiveEngine(), source)
        self.fault = fault or Fault()
        self.calls: list[str] = []

    async def send(self, version: int, timeout_s: float) -> SendAck:
        self.calls.append("send")
        await self.fault.strike("send")
        return await super().send(version, timeout_s)

    async def finalize(self, version: int) -> None:
        self.calls.append("finalize")
        await self.fault.strike("finalize")
        await super().finalize(version)

    async def abort(self) -> None:
        self.calls.append("abort")
        await self.fault.strike("abort")
        await super().abort()


class FaultyReceiver(ReceiverEndpoint):
    def __init__(self, name: str, fault: Fault | None = None) -> None:
        self.sink = Sink(model(0))
        super().__init__(NaiveEngine(), self.sink, name=name)
        self.fault = fault or Fault()
        self.calls: list[str] = []

    async def pause(self, timeout_s: float) -> None:
        self.calls.append("pause")
        await self.fault.strike("pause")
        await super().pause(timeout_s)

    async def receive(self, manifest: bytes, timeout_s: float):
        self.calls.append("receive")
        await self.fault.strike("receive")
        return await super().receive(manifest, timeout_s)

    async def activate(self, version: int, timeout_s: float) -> int:
        self.calls.append("activate")
        await self.fault.strike("activate")
        return await super().activate(version, timeout_s)

    async def resume(self, timeout_s: float) -> None:
        self.calls.append("resume")
        await self.fault.strike("resume")
        await super().resume(timeout_s)


def system(*faults: Fault | None, sender: Fault | None = None):
    """Return a sender, a receiver for each fault, and their manager.

    The deadline is short only where a fault needs it to pass.
    """
    hangs = any(Fault.HANG in fault.phases.values() for fault in (*faults, sender) if fault is not None)
    timeout_s = 1.0 if hangs else 60.0
    source = FaultySender(Source(model(1)), sender)
    receivers = [FaultyReceiver(f"r{i}", fault) for i, fault in enumerate(faults)]
    return source, receivers, CheckpointEngineManager(source, receivers, CheckpointEngineConfig(timeout_s=timeout_s))
