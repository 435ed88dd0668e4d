"""Sends weights and adapters to vLLM's workers, bucket by bucket."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Sequence
from typing import cast

from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import RolloutError
from rl_rollout_vllm.engine.engine_client import EngineClient, LoadedAdapter
from rl_rollout_vllm.engine.requests import ActiveWeights, RequestRunner
from rl_rollout_vllm.weights.adapters import Adapter
from rl_rollout_vllm.weights.buckets import Answer, Bucket, Buckets, split


class WeightLoader:
    """Loads new weights into the workers. Used on the engine's event loop, one call at a time.

    Args:
        client: vLLM.
        requests: aborted before anything is changed.
        active: gets the adapter.
        bucket_bytes: size of a bucket.
    """

    def __init__(
        self, client: EngineClient, requests: RequestRunner, active: ActiveWeights, *, bucket_bytes: int
    ) -> None:
        self._client = client
        self._requests = requests
        self._active = active
        self._bucket_bytes = bucket_bytes
        self._buckets = Buckets(bucket_bytes)
        self._adapter_numbers = itertools.count(1)
        self._adapter: Adapter | None = None

    async def load_weights(self, weights: Sequence[WeightTensor]) -> None:
        """Load all weights of the model, then the adapter, which vLLM drops with the old weights.

        While the workers load a bucket, the next one is filled.
        """
        working: Awaitable[object] = asyncio.ensure_future(self._begin_update())
        for part in split(weights, self._bucket_bytes):
            try:
                await asyncio.sleep(0)  # lets the workers start before this loop is busy filling
                bucket = self._buckets.fill(part)
            finally:
                await working
            working = asyncio.ensure_future(self._send("rollout_load_bucket", bucket))
        await working
        await self._client.call("rollout_finish_update")
        # a request that names a dropped adapter would end the engine's process
        if self._adapter is not None and self._active.adapter is not None:
            await self._send_adapter(self._adapter, self._active.adapter)

    async def load_adapter(self, adapter: Adapter, version: int) -> None:
        """Load an adapter in place of the previous one."""
        await self._requests.quiesce()
        await self._send_adapter(adapter, LoadedAdapter(f"policy-v{version}", next(self._adapter_numbers)))

    async def release_memory(self) -> None:
        """Give the memory of the buckets back, here and in the workers."""
        await self._client.call("rollout_forget_buckets")
        self._buckets.close()

    def close(self) -> None:
        """Give the memory of the buckets back in this process."""
        self._buckets.close()

    async def _begin_update(self) -> None:
        await self._requests.quiesce()
        await self._client.call("rollout_begin_update")

    async def _send_adapter(self, adapter: Adapter, loaded: LoadedAdapter) -> None:
        bucket = self._buckets.fill(adapter.weights)
        await self._send("rollout_load_adapter", bucket, loaded.number, json.dumps(adapter.config))
        self._adapter, self._active.adapter = adapter, loaded

    async def _send(self, method: str, bucket: Bucket, *arguments: object) -> None:
        """Have all workers read a bucket, and compare what they read with what was sent."""
        held: set[int] = set()
        answers = await self._client.call(method, bucket.path, bucket.entries, bucket.digest, *arguments)
        for worker, (digest, inodes) in enumerate(cast("list[Answer]", answers)):
            if digest != bucket.digest:
                raise RolloutError(
                    f"Worker {worker} of the vLLM engine read other bytes than were sent; they are not used."
                )
            held.update(inodes)
        self._buckets.answered(bucket, held)
