"""An engine that counts and logs the bytes it moves, and a manager that records its versions."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import ClassVar

from rl_ckpt_engine import CheckpointEngineManager, Manifest
from rl_ckpt_engine.engines.one_host.shm import ShmEngine
from rl_ckpt_engine.payload.manifest import WeightKind
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.ports import WeightSyncReport

_log = logging.getLogger(__name__)


class ExampleEngine(ShmEngine):
    """Shared memory with counters."""

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "example"
    sent: ClassVar[int] = 0

    async def send_weights(
        self, weights: Iterable[WeightTensor], version: int, *, timeout_s: float, kind: WeightKind = "full"
    ) -> Manifest:
        """See CheckpointEngine.send_weights."""
        type(self).sent += 1
        _log.info("example engine sends version %d", version)
        return await super().send_weights(weights, version, timeout_s=timeout_s, kind=kind)

    async def receive_weights(self, manifest: Manifest, *, timeout_s: float) -> list[WeightTensor]:
        """See CheckpointEngine.receive_weights."""
        _log.info("example engine receives version %d", manifest.version)
        return await super().receive_weights(manifest, timeout_s=timeout_s)


class ExampleManager(CheckpointEngineManager):
    """Records every version that became active."""

    API_VERSION: ClassVar[int] = 1

    @property
    def versions(self) -> tuple[int, ...]:
        """The active versions, oldest first."""
        return tuple(self.__dict__.get("_versions", ()))

    @property
    def metrics(self) -> dict[str, float]:
        """See CheckpointEngineManager.metrics; adds the number of versions that became active."""
        return {**super().metrics, "weight_sync/example_versions": float(len(self.versions))}

    async def update_weights(self, version: int) -> WeightSyncReport:
        """See CheckpointEngineManager.update_weights."""
        report = await super().update_weights(version)
        self.__dict__["_versions"] = (*self.versions, version)
        return report
