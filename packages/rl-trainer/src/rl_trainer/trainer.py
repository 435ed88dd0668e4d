"""The training loop: the driver names rows and waits; it never sees a tensor.

prompts -> rollout workers -> (data plane) -> reward -> old_log_prob | ref | values -> adv -> update_critic | update_actor
        -> update_weights -> clear                                   (stages joined by | run side by side)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from rl_protocol import KVBatchMeta, RLError, balanced_parts
from rl_protocol.ports import DataPlane, SamplingParams, WeightSync
from rl_protocol.rl_columns import TRAIN_PARTITION, VALIDATION_PARTITION, prompt_partition
from rl_trainer.columns import BASELINE_PARTITION
from rl_trainer.config import CriticConfig, LoopConfig, RolloutConfig
from rl_trainer.data import PromptOrder
from rl_trainer.messages import PromptRef, RolloutCall, SaveCall, StageCall, StageResult
from rl_trainer.stages import StepGraph

logger = logging.getLogger(__name__)
T = TypeVar("T")


class WorkerHandle(Protocol):
    """A worker in another process; `bytes_moved` counts every byte of requests and answers that went through the driver."""

    name: str
    bytes_moved: int

    async def call(self, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Run a handler of the worker.

        Raises:
            WorkerError: the worker failed, died, or did not answer in time.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Who does what."""

    rollout: Sequence[WorkerHandle]
    reward: WorkerHandle
    actor: WorkerHandle
    ref: WorkerHandle | None = None
    critic: WorkerHandle | None = None

    def all(self) -> list[WorkerHandle]:
        """Every worker once."""
        return [
            *self.rollout,
            self.reward,
            self.actor,
            *([self.ref] if self.ref else []),
            *([self.critic] if self.critic else []),
        ]


@dataclass(frozen=True, kw_only=True)
class TrainerParts:
    """Everything the loop composes."""

    graph: StepGraph
    plane: DataPlane
    workers: Workers
    weight_sync: WeightSync | None
    """None: rollout keeps the initial weights, and `training/policy_lag` grows."""
    train_order: PromptOrder
    validation_size: int
    rollout: RolloutConfig
    critic: CriticConfig
    loop: LoopConfig
    on_step: Callable[[int, Mapping[str, float]], None]
    """Called with (step, metrics) after each step; step 0 is the validation before training."""


@dataclass
class _Clock:
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    async def time(self, name: str, work: Awaitable[T]) -> T:
        start = time.perf_counter()
        try:
            return await work
        finally:
            self.seconds[f"timing_s/{name}"] = self.seconds.get(f"timing_s/{name}", 0.0) + time.perf_counter() - start


class PPOTrainer:
    """Runs the steps of PPO, GRPO and their relatives over workers, a data plane and a weight sync.

    Lifecycle: build it with `TrainerParts`, await `fit()`, which returns the metrics of the last validation. It owns none of its parts: whoever
    built them closes them.
    """

    def __init__(self, parts: TrainerParts) -> None:
        self._p = parts
        self._version = 0

    async def fit(self) -> dict[str, float]:
        """Train for the configured number of steps.

        Raises:
            RLError: whatever a part raised; the loop stops at the first.
        """
        loop = self._p.loop
        last: dict[str, float] = {}
        if loop.val_before_train:
            last = await self.validate(0)
            self._p.on_step(0, last)
        for step in range(1, loop.total_training_steps + 1):
            metrics = await self.step(step)
            final = step == loop.total_training_steps
            if final or (loop.test_freq and step % loop.test_freq == 0):
                start = time.perf_counter()
                last = await self.validate(step)
                metrics |= last | {"timing_s/testing": time.perf_counter() - start}
            self._p.on_step(step, metrics)
        return last

    async def step(self, step: int) -> dict[str, float]:
        """One step; returns its metrics."""
        p, clock, metrics = self._p, _Clock(), {"training/global_step": float(step)}
        bytes_before, start = self._driver_bytes(), time.perf_counter()
        prompts = [PromptRef(f"s{step}-{i}", row) for i, row in enumerate(p.train_order.rows(step - 1))]
        async with self._rows(TRAIN_PARTITION):
            tagged = await clock.time(
                "gen", self._rollout(TRAIN_PARTITION, "train", step, prompts, p.rollout.n, self._sampling())
            )
            metrics["training/policy_lag"] = float(
                self._version - min(int(v or 0) for v in tagged.tag_values("version"))
            )
            batch = tagged.without_tags()
            metrics |= await clock.time("reward", self._stage(p.workers.reward, "reward", step, batch))
            if "baseline" in p.graph:
                metrics |= await clock.time("baseline", self._baseline(step, prompts, batch))
            metrics |= await self._forward_stages(clock, step, batch)
            metrics |= await clock.time("adv", self._stage(p.workers.reward, "adv", step, batch))
            metrics |= await self._update_stages(clock, step, batch)
        if (
            p.weight_sync is not None and "actor/lr" in metrics
        ):  # not while the critic alone is trained: nothing has changed
            report = await clock.time("update_weights", p.weight_sync.update_weights(self._version))
            metrics |= {"weight_sync/bytes": float(report.num_bytes), "weight_sync/version": float(report.version)}
            metrics["weight_sync/receivers"] = float(len(report.receivers))
        elapsed = time.perf_counter() - start
        metrics |= clock.seconds | {"timing_s/step": elapsed, "perf/time_per_step": elapsed}
        metrics["perf/throughput"] = metrics["perf/total_num_tokens"] / elapsed
        metrics["perf/driver_bytes"] = float(self._driver_bytes() - bytes_before)
        return metrics

    async def validate(self, step: int) -> dict[str, float]:
        """Roll out the validation set with rollout.val_kwargs and report accuracy by data source."""
        p, sampling = self._p, self._p.rollout.val_kwargs
        prompts = [PromptRef(f"v{step}-{row}", row) for row in range(p.validation_size)]
        params = msgspec.structs.replace(
            self._sampling(), temperature=sampling.temperature, top_p=1.0, top_k=0, ignore_eos=False
        )
        async with self._rows(VALIDATION_PARTITION):
            batch = await self._rollout(VALIDATION_PARTITION, "val", step, prompts, sampling.n, params)
            return await self._stage(p.workers.reward, "evaluate", step, batch.without_tags())

    async def save(self, path: Path) -> None:
        """Have the actor write a Hugging Face checkpoint folder at this absolute path."""
        call = msgspec.msgpack.encode(SaveCall(path=str(path)))
        await self._p.workers.actor.call("save", call, timeout_s=self._p.loop.stage_timeout_s)

    # -- the parts of a step
    async def _rollout(
        self, partition: str, split: str, step: int, prompts: Sequence[PromptRef], n: int, sampling: SamplingParams
    ) -> KVBatchMeta:
        shares = balanced_parts([1] * len(prompts), len(self._p.workers.rollout))
        calls = [
            RolloutCall(
                partition=partition,
                split=split,
                step=step,
                prompts=tuple(prompts[i] for i in share),
                n=n,
                sampling=sampling,
            )
            for share in shares
        ]
        workers = self._p.workers.rollout
        await _together(*(self._call(w, "rollout", c) for w, c in zip(workers, calls, strict=True) if c.prompts))
        writes = [
            name
            for name in self._p.graph["rollout"].writes
            if name in ("responses", "response_mask", "rollout_log_probs")
        ]
        count, where = len(prompts) * n, {"step": step}
        ready = await self._p.plane.wait_ready(
            partition, count=count, fields=writes, where=where, timeout_s=self._p.loop.stage_timeout_s
        )
        return ready.select_keys(sorted(ready.keys))  # by name, not by arrival: the same batch in every run

    async def _baseline(self, step: int, prompts: Sequence[PromptRef], batch: KVBatchMeta) -> dict[str, float]:
        """One greedy response per prompt, scored: the baseline of its other responses."""
        reward, greedy = self._p.workers.reward, msgspec.structs.replace(self._sampling(), temperature=0.0)
        async with self._rows(BASELINE_PARTITION):
            rows = await self._rollout(BASELINE_PARTITION, "train", step, prompts, 1, greedy)
            await self._stage(reward, "reward", step, rows.without_tags())
            return await self._stage(reward, "baseline", step, batch)

    async def _forward_stages(self, clock: _Clock, step: int, batch: KVBatchMeta) -> dict[str, float]:
        w = self._p.workers
        stages = [("old_log_prob", w.actor), ("ref", w.ref), ("values", w.critic)]
        return await self._side_by_side(clock, step, batch, stages)

    async def _update_stages(self, clock: _Clock, step: int, batch: KVBatchMeta) -> dict[str, float]:
        w = self._p.workers
        actor_turn = w.critic is None or step > self._p.critic.warmup_steps
        stages = [("update_critic", w.critic), ("update_actor", w.actor if actor_turn else None)]
        metrics = await self._side_by_side(clock, step, batch, stages)
        if actor_turn:
            self._version += 1
        return metrics

    async def _side_by_side(
        self, clock: _Clock, step: int, batch: KVBatchMeta, stages: Sequence[tuple[str, WorkerHandle | None]]
    ) -> dict[str, float]:
        work = [
            clock.time(name, self._stage(w, name, step, batch))
            for name, w in stages
            if w is not None and name in self._p.graph
        ]
        merged: dict[str, float] = {}
        for result in await _together(*work):
            merged |= result
        return merged

    async def _stage(self, worker: WorkerHandle, name: str, step: int, batch: KVBatchMeta) -> dict[str, float]:
        return (await self._call(worker, name, StageCall(step=step, batch=batch))).metrics

    async def _call(self, worker: WorkerHandle, method: str, message: msgspec.Struct) -> StageResult:
        answer = await worker.call(method, msgspec.msgpack.encode(message), timeout_s=self._p.loop.stage_timeout_s)
        return msgspec.msgpack.decode(answer, type=StageResult)

    @asynccontextmanager
    async def _rows(self, partition: str) -> AsyncGenerator[None]:
        """The rows of one step, removed when it ends well; after a failure they stay in the plane for inspection."""
        yield
        for name in (partition, prompt_partition(partition)):
            await self._p.plane.clear(name)

    def _sampling(self) -> SamplingParams:
        r = self._p.rollout
        return SamplingParams(
            max_new_tokens=r.response_length,
            temperature=r.temperature,
            top_p=r.top_p,
            top_k=r.top_k,
            ignore_eos=r.ignore_eos,
            seed=self._p.loop.seed,
        )

    def _driver_bytes(self) -> int:
        """Bytes that went through this process: worker calls and answers, and all of its data plane client."""
        return sum(w.bytes_moved for w in self._p.workers.all()) + self._p.plane.traffic().total


async def _together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Run side by side; the first failure cancels the rest and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(w) for w in work]
    except* RLError as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in running]
