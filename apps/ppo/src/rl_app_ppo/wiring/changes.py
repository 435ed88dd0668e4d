"""What an engine `delta-*` saves: how much of the weights changed since the version committed last, and what the changes weigh."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec
import numpy as np

from rl_ckpt_engine import CheckpointEngine, Manifest, SenderEndpoint, WeightKind
from rl_ckpt_engine.engines.delta import DeltaEngine, DeltaPlacement
from rl_protocol import WeightSyncError, WeightTensor
from rl_protocol.dtypes import storage_dtype
from rl_protocol.ports import WeightSender


class ChangeCounter:
    """WeightSender over another one that compares, on the way, with what the engine keeps.

    Attributes:
        share: elements whose bits differ from the version committed last, of all; 1 where there is none or it had no such tensor.
    """

    def __init__(self, source: WeightSender, engine: DeltaEngine) -> None:
        self._source = source
        self._engine = engine
        self.share = 0.0

    def named_weights(self) -> Iterator[WeightTensor]:
        """See rl_protocol.ports.WeightSender."""
        try:
            before = {weight.name: weight for weight in self._engine.get_weights()[1]}
        except WeightSyncError:  # nothing was committed yet
            before = {}
        changed = total = 0
        for weight in self._source.named_weights():
            changed += _changed(before.get(weight.name), weight)
            total += weight.nbytes // storage_dtype(weight.dtype).itemsize
            yield weight
        self.share = changed / max(total, 1)


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

    def __init__(self, engine: CheckpointEngine, source: WeightSender, *, kind: WeightKind = "full") -> None:
        self._counter = ChangeCounter(source, engine) if isinstance(engine, DeltaEngine) else None
        # where no response of a step teaches anything, the adapter stays as it is
        super().__init__(engine, self._counter or source, kind=kind, must_change=False)
        self.metrics: dict[str, float] = {}

    async def send(self, version: int, timeout_s: float) -> bytes:
        """See SenderEndpoint.send."""
        manifest = await super().send(version, timeout_s)
        if self._counter is not None:
            self.metrics = {
                "weight_sync/changed_share": self._counter.share,
                "weight_sync/delta_bytes": float(delta_bytes(manifest)),
            }
        return manifest


def delta_bytes(manifest: bytes) -> int:
    """Bytes that the tensors of a delta engine's manifest travel as."""
    placement = msgspec.msgpack.decode(Manifest.decode(manifest).placement, type=DeltaPlacement)
    return Manifest.decode(placement.carrier).tensor_nbytes


def _changed(before: WeightTensor | None, after: WeightTensor) -> int:
    word = np.dtype(f"u{storage_dtype(after.dtype).itemsize}")
    if before is None or (before.dtype, before.shape) != (after.dtype, after.shape):
        return after.nbytes // word.itemsize
    return int(np.count_nonzero(before.data.view(word) != after.data.view(word)))
