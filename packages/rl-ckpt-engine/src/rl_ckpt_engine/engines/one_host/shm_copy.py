"""Engine `shm-copy`: receivers on the same host copy the memory of the sender into their own.

The sender is that of engine `shm`. A receiver copies a version block by block and verifies each
block of the copy while it is in the cache. It can begin while the sender still writes (`prefetch`).
If a sink computes with the tensors in place, the next version goes into a second buffer, so the
version in use depends neither on the sender nor on the next sync.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import ClassVar

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.engines.base.memfd import SealedSlot
from rl_ckpt_engine.engines.base.prefetch import Prefetch
from rl_ckpt_engine.engines.base.publishing_engine import PublishingEngine
from rl_ckpt_engine.engines.base.receive_buffer import Bucket
from rl_ckpt_engine.engines.base.sender_memory import MapsSender, SenderMemory
from rl_ckpt_engine.engines.contract import Capabilities
from rl_ckpt_engine.payload.block_stream import Deadline
from rl_ckpt_engine.payload.manifest import Manifest
from rl_protocol.batch.weight_tensor import WeightTensor


class ShmCopyEngine(MapsSender, PublishingEngine[SealedSlot]):
    """Shared memory that receivers copy; a sender keeps two slots until `close`."""

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "shm-copy"
    capabilities: ClassVar[Capabilities] = Capabilities(
        same_host_only=True,
        zero_copy=False,
        elastic=True,
        devices=("cpu",),
        caches=True,
        direct=True,
        shares=True,
        prefetches=True,
    )

    def __init__(self, config: CheckpointEngineConfig | None = None) -> None:
        super().__init__(config)
        self._memory = SenderMemory()

    async def _fetch(self, manifest: Manifest, deadline: Deadline) -> list[WeightTensor]:
        buffer = self._buffers.next()
        copy, there = buffer.reserve(manifest.payload_nbytes), buffer.take_prefetched(manifest)
        self.verify_seconds = await self._memory.copy(manifest, copy, deadline, skip=there)
        return buffer.tensors(manifest)

    def _pull_ahead(self, buckets: Sequence[Bucket], prefetch: Prefetch) -> AsyncGenerator[None]:
        return self._memory.copy_written(buckets, prefetch)
