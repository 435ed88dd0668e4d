"""Engine `shm`: receivers on the same host map the memory of the sender read-only.

The sender copies the weights once. It owns two slots (see memfd) and writes each version into the
one that does not hold the version committed last. Receivers map it (see sender_memory), compare
header and digests, and return views: one copy for any number of receivers. A source that writes its
tensors into `room` saves this copy, too.

A sink may compute with the views. Its active version is the one committed last, whose slot is
sealed and is reused only after all receivers in use have activated the next version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.engines.base.memfd import SealedSlot
from rl_ckpt_engine.engines.base.publishing_engine import PublishingEngine
from rl_ckpt_engine.engines.base.sender_memory import MapsSender, SenderMemory
from rl_ckpt_engine.engines.contract import Capabilities
from rl_ckpt_engine.payload.block_stream import Deadline, verify
from rl_ckpt_engine.payload.manifest import Manifest
from rl_protocol.batch.weight_tensor import WeightTensor


class ShmEngine(MapsSender, PublishingEngine[SealedSlot]):
    """Shared memory between processes of one host; a sender keeps two slots until `close`."""

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "shm"
    capabilities: ClassVar[Capabilities] = Capabilities(
        same_host_only=True,
        zero_copy=True,
        elastic=True,
        devices=("cpu",),
        caches=True,
        direct=True,
        shares=True,
    )

    def __init__(self, config: CheckpointEngineConfig | None = None) -> None:
        super().__init__(config)
        self._memory = SenderMemory()

    async def _fetch(self, manifest: Manifest, deadline: Deadline) -> list[WeightTensor]:
        weights = self._memory.views(manifest)
        self.verify_seconds = await verify(manifest, weights, deadline)
        return weights

    def _require_there(self, manifest: Manifest) -> None:
        self._memory.require(manifest)

    def watch(self, manifest: Manifest) -> Callable[[], None]:
        self.confirm(manifest)
        return self._memory.watch(manifest)
