"""What an engine `delta-*` saves: how much of the weights changed since the version committed last, and what the changes weigh."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from rl_ckpt_engine import CheckpointEngine, Manifest, SenderEndpoint, WeightKind
from rl_ckpt_engine.engines.delta import DeltaEngine, DeltaPlacement
from rl_protocol.ports import WeightSender
from rl_protocol.weights import WeightTensor


class AdapterSource(Protocol):
    """A policy that can give its adapter apart from the weights it belongs to."""

    def adapter_weights(self) -> Iterable[WeightTensor]:
        """Its tensors, named as in a PEFT folder; on several ranks a collective, as `named_weights`."""
        ...


class AdapterOnly:
    """WeightSender of the adapter of a policy."""

    def __init__(self, source: AdapterSource) -> None:
        self._source = source

    def named_weights(self) -> Iterable[WeightTensor]:
        """See AdapterSource.adapter_weights."""
        return self._source.adapter_weights()


class MeasuredSender(SenderEndpoint):
    """SenderEndpoint that tells what its last send saved, when its engine sends changes alone.

    Attributes:
        metrics: of the last send; empty with other engines.
    """

    def __init__(
        self, engine: CheckpointEngine, source: WeightSender, *, kind: WeightKind = "full", dtype: str = ""
    ) -> None:
        # where no response of a step teaches anything, the adapter stays as it is
        super().__init__(engine, source, kind=kind, dtype=dtype, must_change=False)
        self.metrics: dict[str, float] = {}

    async def send(self, version: int, timeout_s: float) -> bytes:
        """See SenderEndpoint.send."""
        manifest = await super().send(version, timeout_s)
        if isinstance(self._engine, DeltaEngine):
            self.metrics = {
                "weight_sync/changed_share": self._engine.changed_share,
                "weight_sync/delta_bytes": float(delta_bytes(manifest)),
            }
        return manifest


def delta_bytes(manifest: bytes) -> int:
    """Bytes that the tensors of a delta engine's manifest travel as."""
    placement = msgspec.msgpack.decode(Manifest.decode(manifest).placement, type=DeltaPlacement)
    return Manifest.decode(placement.carrier).tensor_nbytes
