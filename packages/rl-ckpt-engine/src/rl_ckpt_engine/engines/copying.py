"""What engines have in common whose receivers copy the weights into memory of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Self

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.engines.base import P, PublishingEngine
from rl_ckpt_engine.manifest import Manifest
from rl_ckpt_engine.staging import Bucket, Staging
from rl_ckpt_engine.stream import Deadline
from rl_protocol.weights import WeightTensor


class CopyingEngine(PublishingEngine[P]):
    """Receivers pull the buckets they lack (see staging) and verify them on the way."""

    def __init__(self, config: CheckpointEngineConfig | None = None) -> None:
        super().__init__()
        self._config = CheckpointEngineConfig() if config is None else config
        self._staging = Staging(self._config.bucket_bytes)

    @classmethod
    def create(cls, config: CheckpointEngineConfig) -> Self:
        """See CheckpointEngine.create."""
        return cls(config)

    @property
    def pulled_nbytes(self) -> int:
        """Bytes that the last receive_weights asked the sender for; what was there already is not among them."""
        return self._staging.pulled_nbytes

    @abstractmethod
    def _pull(self, manifest: Manifest, buckets: Sequence[Bucket], deadline: Deadline) -> AsyncGenerator[None]:
        """Fill the memory of each bucket in turn, and yield after each."""

    def _new_outlet(self) -> Self:
        return type(self)(self._config)

    async def _fetch(self, manifest: Manifest, deadline: Deadline) -> list[WeightTensor]:
        weights = await self._staging.fill(manifest, lambda buckets: self._pull(manifest, buckets, deadline), deadline)
        self.verify_seconds = self._staging.verify_seconds
        return weights

    def close(self) -> None:
        """See CheckpointEngine.close."""
        super().close()
        self._staging.clear()
