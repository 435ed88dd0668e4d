"""GenerationControl: stop and start generation, and free and restore memory, on all replicas."""

from __future__ import annotations

import asyncio

from rl_ckpt_engine.sync.replica_set import ReplicaSet
from rl_protocol.ports import Memory


class GenerationControl:
    """Controls all replicas between two syncs; a call waits for a running sync.

    A replica on which a call fails is quarantined. All methods raise WeightSyncError if the call
    failed on all replicas.

    Args:
        replicas: the replicas.
        lock: held during a sync and during a call.
        timeout_s: deadline of a call in seconds.

    Attributes:
        stopped: whether `abort` was called and `resume` was not.
    """

    def __init__(self, replicas: ReplicaSet, lock: asyncio.Lock, timeout_s: float) -> None:
        self._replicas = replicas
        self._lock = lock
        self._timeout_s = timeout_s
        self.stopped = False

    async def abort(self) -> None:
        """Abort running requests and admit none until `resume`.

        Neither a sync nor a new receiver resumes generation.
        """
        self.stopped = True
        async with self._lock:
            await self._replicas.call("pause", lambda handle: handle.pause(self._timeout_s))

    async def resume(self) -> None:
        """Admit requests again."""
        self.stopped = False
        async with self._lock:
            await self._replicas.call("resume", lambda handle: handle.resume(self._timeout_s))

    async def sleep(self, level: int = 1) -> int | None:
        """Abort running requests and free memory until `wake`.

        Args:
            level: 1 offloads the weights and drops the KV cache. 2 drops the weights, too, on
                replicas that can; they must be sent between `wake("weights")` and
                `wake("kv_cache")`.

        Returns:
            Bytes freed on all replicas that count them; None: no replica does.
        """
        async with self._lock:
            freed = await self._replicas.call("sleep", lambda handle: handle.sleep(level, self._timeout_s))
        known = [size for size in freed if size is not None]
        return sum(known) if known else None

    async def wake(self, part: Memory | None = None) -> None:
        """Restore one part of the memory, or all of it."""
        async with self._lock:
            await self._replicas.call("wake", lambda handle: handle.wake(part, self._timeout_s))

    async def release_kv_cache(self) -> int | None:
        """Abort running requests and free only the KV cache; returns the bytes freed as `sleep`."""
        freed = await self.sleep(1)
        await self.wake("weights")
        return freed

    async def resume_kv_cache(self) -> None:
        """Allocate the KV cache again and admit requests."""
        await self.wake("kv_cache")
