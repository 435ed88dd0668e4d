"""Frees the memory of the rollout replicas while the models are updated."""

from __future__ import annotations

from rl_protocol.ports import Memory, RolloutMemory
from rl_trainer.driver.stage_runner import Clock


class RolloutSleep:
    """Lets the replicas sleep during the updates of a step; no effect without `memory`.

    Lifecycle, in each step: `begin`, the updates, `wake("weights")` if new weights are sent,
    `wake("kv_cache")`. The replicas generate nothing in between.
    """

    def __init__(self, memory: RolloutMemory | None) -> None:
        self._memory = memory
        self._asleep = False

    async def begin(self, clock: Clock, *, weights_follow: bool) -> dict[str, float]:
        """Free memory; returns metrics.

        Raises:
            WeightSyncError: see RolloutMemory.sleep.
        """
        if self._memory is None:
            return {}
        self._asleep = True
        freed = await clock.time("sleep", self._memory.sleep(weights_follow=weights_follow))
        return {} if freed is None else {"perf/sleep_freed_bytes": float(freed)}

    async def wake(self, clock: Clock, part: Memory) -> None:
        """Restore one part of the memory, if the replicas sleep.

        Raises:
            WeightSyncError: see RolloutMemory.wake.
        """
        if self._memory is None or not self._asleep:
            return
        await clock.time("wake", self._memory.wake(part))
        self._asleep = part != "kv_cache"
