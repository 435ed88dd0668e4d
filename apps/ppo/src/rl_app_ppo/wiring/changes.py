"""What an engine `delta-*` saves: how much of the weights changed since the version committed last, and what the changes weigh."""

from __future__ import annotations

import msgspec

from rl_ckpt_engine import CheckpointEngine, Manifest, SenderEndpoint
from rl_ckpt_engine.engines.delta import DeltaEngine, DeltaPlacement
from rl_protocol.ports import WeightSender


class MeasuredSender(SenderEndpoint):
    """SenderEndpoint that tells what its last send saved, when its engine sends changes alone.

    Attributes:
        metrics: of the last send; empty with other engines.
    """

    def __init__(self, engine: CheckpointEngine, source: WeightSender, *, dtype: str = "") -> None:
        super().__init__(engine, source, dtype=dtype)
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
