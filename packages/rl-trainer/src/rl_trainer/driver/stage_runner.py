"""Runs stages on the ranks of the models while replicas sleep, and measures how long each takes."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from rl_protocol import RLError
from rl_protocol.ports import Memory, RolloutMemory
from rl_trainer.asyncio_tasks import gather_or_cancel
from rl_trainer.driver.stage_calls import WorkerHandle, read_ahead, run_stage
from rl_trainer.workers.messages import StageCall

T = TypeVar("T")


@contextmanager
def noted(where: str) -> Generator[None]:
    """Add to an RLError the place where it was raised, the innermost place first."""
    try:
        yield
    except RLError as error:
        error.add_note(where)
        raise


@dataclass
class Clock:
    """Seconds per stage of one step, as the metrics `timing_s/<stage>`."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    async def time(self, name: str, work: Awaitable[T]) -> T:
        """Await the work and add its time to the stage; an error notes the stage."""
        start = time.perf_counter()
        try:
            with noted(f"stage {name}"):
                return await work
        finally:
            self.seconds[f"timing_s/{name}"] = self.seconds.get(f"timing_s/{name}", 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class ModelStage:
    """A stage of one model, with the call of each of its ranks."""

    name: str
    ranks: Sequence[WorkerHandle]
    calls: Sequence[StageCall]

    def beside(self, processes: int) -> ModelStage:
        """The stage with calls that say how many processes compute at the same time."""
        calls = [msgspec.structs.replace(call, side_by_side=processes) for call in self.calls]
        return replace(self, calls=calls)


class StageRunner:
    """Runs stages of different processes at the same time, and those of the same process in turn.

    Stages of the same processes can't overlap: their ranks wait for each other, in the order of the
    calls. Each call says how many processes compute beside it, so that a stage that runs alone can
    use all cores.

    Args:
        timeout_s: longest time of one call.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def read_ahead(self, clock: Clock, stages: Sequence[ModelStage]) -> None:
        """Have all ranks read the rows of all stages."""
        await self._side_by_side(clock, stages, self._read_ahead)

    async def forward(self, clock: Clock, stages: Sequence[ModelStage]) -> dict[str, float]:
        """Run stages that read their rows themselves; returns their metrics."""
        return await self._side_by_side(clock, stages, self._forward)

    async def update(self, clock: Clock, stages: Sequence[ModelStage]) -> dict[str, float]:
        """Run stages whose rows were read ahead; returns their metrics."""
        return await self._side_by_side(clock, stages, self._run)

    async def _side_by_side(
        self, clock: Clock, stages: Sequence[ModelStage], work: Callable[[ModelStage], Awaitable[dict[str, float]]]
    ) -> dict[str, float]:
        chains: dict[int, list[ModelStage]] = {}
        for stage in stages:
            chains.setdefault(id(stage.ranks[0].process), []).append(stage)
        computing = sum(len(chain[0].ranks) for chain in chains.values())

        async def run_chain(chain: Sequence[ModelStage]) -> dict[str, float]:
            metrics: dict[str, float] = {}
            for stage in chain:
                metrics |= await clock.time(stage.name, work(stage.beside(computing)))
            return metrics

        merged: dict[str, float] = {}
        for metrics in await gather_or_cancel(*(run_chain(chain) for chain in chains.values())):
            merged |= metrics
        return merged

    async def _forward(self, stage: ModelStage) -> dict[str, float]:
        if len(stage.ranks) > 1:  # a rank that lacks its rows would make the others wait inside the stage
            await self._read_ahead(stage)
        return await self._run(stage)

    async def _read_ahead(self, stage: ModelStage) -> dict[str, float]:
        await read_ahead(stage.ranks, stage.name, stage.calls, self._timeout_s)
        return {}

    async def _run(self, stage: ModelStage) -> dict[str, float]:
        return await run_stage(stage.ranks, stage.name, stage.calls, self._timeout_s)


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
