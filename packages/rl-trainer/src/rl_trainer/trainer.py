"""The training loop: the driver names rows and waits; it never sees a tensor.

prompts -> rollout workers -> (data plane) -> reward -> filter? -> old_log_prob | ref | values -> adv -> update_critic | update_actor
        -> update_weights -> clear                                   (stages joined by | run side by side)

When a storage unit dies with rows of the step, everything before the updates is done again from the same prompts. All ranks read what the
updates need before the first of them begins; from then on the step needs no row any more, and it is never repeated.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from rl_protocol import DataLostError, KVBatchMeta, PlaneTimeout, RLError, RowKey
from rl_protocol.ports import DataPlane, SamplingParams, WeightSync
from rl_protocol.rl_columns import TRAIN_PARTITION, VALIDATION_PARTITION, prompt_partition
from rl_trainer.algorithms.dapo import Generate, GiveUp, Train, next_round
from rl_trainer.checkpoints.folder import Checkpoint, RunState
from rl_trainer.checkpoints.writer import CheckpointWriter, load
from rl_trainer.columns import BASELINE_PARTITION
from rl_trainer.config import ActorConfig, CriticConfig, FilterGroupsConfig, LoopConfig, RolloutConfig
from rl_trainer.course import course_metrics
from rl_trainer.data import PromptOrder
from rl_trainer.dispatch import (
    StepRows,
    WorkerHandle,
    Workers,
    call,
    forward_calls,
    read_ahead,
    run_stage,
    together,
    update_calls,
)
from rl_trainer.hooks import Hook, tell
from rl_trainer.messages import (
    FilterResult,
    PromptRef,
    RewardResult,
    RolloutCall,
    SaveCall,
    StageCall,
    StageResult,
)
from rl_trainer.routing import roll_out
from rl_trainer.settings import require
from rl_trainer.stages import StepGraph

logger = logging.getLogger(__name__)
T = TypeVar("T")
ATTEMPTS = 4
"""How often the rows of a step, or of a validation, are made, if storage units die with them."""
_ALL_THERE_S = 1.0
"""Rows whose writers have finished are there within this time, or they are lost."""


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
    actor: ActorConfig
    critic: CriticConfig
    loop: LoopConfig
    on_step: Callable[[int, Mapping[str, float]], None]
    """Called with (step, metrics) after each step; step 0 is the validation before training."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    """Looked at where the graph has the stage `filter`."""
    checkpoints: CheckpointWriter | None = None
    """Writes checkpoints every loop.save_freq steps, and one after the last step; None: there are none."""
    hooks: Mapping[str, Hook] = field(default_factory=dict[str, Hook])
    """Name -> whom to tell what happens."""


@dataclass(frozen=True, slots=True)
class _Rolled:
    """What a rollout has put into the plane."""

    rows: KVBatchMeta
    """Trajectories, with tags."""
    imbalance: float
    """Of the replicas."""
    truncated: int
    """Trajectories that reached rollout.response_length."""


@dataclass
class _Clock:
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    async def time(self, name: str, work: Awaitable[T]) -> T:
        start = time.perf_counter()
        try:
            with _noted(f"stage {name}"):
                return await work
        finally:
            self.seconds[f"timing_s/{name}"] = self.seconds.get(f"timing_s/{name}", 0.0) + time.perf_counter() - start


@contextmanager
def _noted(where: str) -> Generator[None]:
    """Note in an error where it came up, the innermost place first."""
    try:
        yield
    except RLError as error:
        error.add_note(where)
        raise


@dataclass(frozen=True)
class _Stage:
    """A stage of one model, and the call of each of its ranks."""

    name: str
    ranks: Sequence[WorkerHandle]
    calls: Sequence[StageCall]


class PPOTrainer:
    """Runs the steps of PPO, GRPO and their relatives over workers, a data plane and a weight sync.

    Lifecycle: build it with `TrainerParts`, await `resume()` to go on from a checkpoint, then `fit()`, which returns the metrics of the last
    validation. It owns none of its parts: whoever built them closes them.

    Raises:
        ConfigError: the number of steps is not known.
    """

    def __init__(self, parts: TrainerParts) -> None:
        steps = parts.loop.total_training_steps
        require(steps >= 0, "trainer.total_training_steps", "at least 0 where training starts", steps)
        self._p = parts
        self._steps_done = 0
        self._version = 0
        self._prompts_taken = 0
        self._prompts: list[PromptRef] = []
        self._critic_updates = 0

    async def resume(self, checkpoint: Checkpoint) -> None:
        """Take everything over: workers their state, rollout the weights, and the driver its place.

        Raises:
            ConfigError: the checkpoint is that of another model.
            RLError: whatever a part raised.
        """
        p, state = self._p, checkpoint.run_state
        await load(checkpoint, p.workers, p.loop.stage_timeout_s)
        self._steps_done, self._version = state.step, state.version
        self._critic_updates, self._prompts_taken = state.critic_updates, state.prompts_taken
        if p.weight_sync is not None and self._version:
            await p.weight_sync.update_weights(self._version)

    async def fit(self) -> dict[str, float]:
        """Train for the configured number of steps, those before a checkpoint included.

        Raises:
            RLError: whatever a part raised; the loop stops at the first.
        """
        try:
            self._tell("on_train_begin", self._steps_done)
            last = await self._fit()
            if self._p.checkpoints is not None:
                with _noted("stage save_checkpoint"):
                    self._published(await self._p.checkpoints.finish())
            self._tell("on_train_end", self._steps_done)
        except (RLError, asyncio.CancelledError) as error:
            if self._p.checkpoints is not None:
                await self._p.checkpoints.abandon(wait=isinstance(error, RLError))
            raise
        return last

    async def _fit(self) -> dict[str, float]:
        loop = self._p.loop
        last: dict[str, float] = {}
        validates = self._p.validation_size > 0
        if validates and loop.val_before_train and not self._steps_done:
            last = await self.validate(0)
            self._p.on_step(0, last)
        for step in range(self._steps_done + 1, loop.total_training_steps + 1):
            self._tell("on_step_begin", step)
            with _noted(f"step {step}"):
                metrics = await self.step(step)
            final, validated = step == loop.total_training_steps, dict[str, float]()
            if validates and (final or (loop.test_freq and step % loop.test_freq == 0)):
                start = time.perf_counter()
                last = validated = await self.validate(step)
                metrics |= last | {"timing_s/testing": time.perf_counter() - start}
            self._steps_done = step
            with _noted(f"step {step}"), _noted("stage save_checkpoint"):
                metrics |= await self._save(final, score_of(validated))
            self._p.on_step(step, metrics)
            self._tell("on_step_end", step, metrics)
        return last

    async def _save(self, final: bool, score: float | None) -> dict[str, float]:
        """Begin a checkpoint where one is due; metrics of one that is finished, and how long the loop stood still."""
        loop, writer = self._p.loop, self._p.checkpoints
        if writer is None:
            return {}
        start = time.perf_counter()
        if not (final or (loop.save_freq and self._steps_done % loop.save_freq == 0)):
            return self._published(writer.metrics())
        metrics = self._published(await writer.finish())
        self._tell("on_checkpoint_begin", self._steps_done)
        state = RunState(
            step=self._steps_done,
            version=self._version,
            critic_updates=self._critic_updates,
            prompts_taken=self._prompts_taken,
        )
        await writer.begin(state, score)
        return metrics | {"timing_s/save_checkpoint": time.perf_counter() - start}

    def _published(self, metrics: dict[str, float]) -> dict[str, float]:
        """Tell of a checkpoint that has become whole; `metrics` are those of the writer."""
        if metrics and self._p.checkpoints is not None:
            step = int(metrics["checkpoint/step"])
            folder = self._p.checkpoints.folder_of(step)
            self._tell("on_checkpoint_end", step, folder)
        return metrics

    def _tell(self, event: str, *facts: object) -> None:
        tell(self._p.hooks, event, *facts)

    async def step(self, step: int) -> dict[str, float]:
        """One step; returns its metrics."""
        p, clock, metrics = self._p, _Clock(), {"training/global_step": float(step)}
        bytes_before, cpu_before, start = self._driver_bytes(), time.process_time(), time.perf_counter()
        async with self._rows(TRAIN_PARTITION):
            taken = self._prompts_taken

            async def prepare() -> tuple[dict[str, float], list[_Stage]]:
                self._prompts_taken = taken
                return await self._prepare(clock, step)

            prepared, updates = await self._repeated(step, (TRAIN_PARTITION, BASELINE_PARTITION), prepare)
            metrics |= prepared
            if updates:
                metrics |= await self._update(clock, updates)
        if (
            p.weight_sync is not None and "actor/lr" in metrics
        ):  # not while the critic alone is trained: nothing has changed
            report = await clock.time("update_weights", p.weight_sync.update_weights(self._version))
            metrics |= {"weight_sync/bytes": float(report.num_bytes), "weight_sync/version": float(report.version)}
            metrics["weight_sync/receivers"] = float(len(report.receivers))
        elapsed = time.perf_counter() - start
        metrics |= clock.seconds | {"timing_s/step": elapsed, "perf/time_per_step": elapsed}
        metrics["perf/throughput"] = metrics.get("perf/total_num_tokens", 0.0) / elapsed
        metrics["perf/driver_cpu_s"] = time.process_time() - cpu_before
        metrics["perf/driver_bytes"] = float(self._driver_bytes() - bytes_before)
        return metrics

    async def validate(self, step: int) -> dict[str, float]:
        """Roll out the validation set with rollout.val_kwargs and report accuracy by data source."""
        sampling = self._p.rollout.val_kwargs
        self._tell("on_validate_begin", step)
        prompts = [PromptRef(f"v{step}-{row}", row) for row in range(self._p.validation_size)]
        params = msgspec.structs.replace(
            self._sampling(), temperature=sampling.temperature, top_p=1.0, top_k=0, ignore_eos=False
        )
        with _noted(f"validation after step {step}"):
            metrics = await self._validate(step, prompts, sampling.n, params)
        self._tell("on_validate_end", step, metrics)
        return metrics

    async def _validate(
        self, step: int, prompts: Sequence[PromptRef], n: int, params: SamplingParams
    ) -> dict[str, float]:
        async def evaluate() -> dict[str, float]:
            batch = (await self._rollout(VALIDATION_PARTITION, "val", step, prompts, n, params)).rows
            judged = await self._scored("evaluate", step, batch.without_tags())
            return judged.metrics | {f"val-aux/{name}": value for name, value in course_metrics(batch).items()}

        async with self._rows(VALIDATION_PARTITION):
            return await self._repeated(step, (VALIDATION_PARTITION,), evaluate)

    async def save(self, path: Path) -> None:
        """Have the actor write a Hugging Face checkpoint folder at this absolute path."""
        message, timeout_s = SaveCall(path=str(path)), self._p.loop.stage_timeout_s
        await together(*(call(rank, "save", message, StageResult, timeout_s) for rank in self._p.workers.actor))

    # -- the parts of a step
    async def _repeated(self, step: int, partitions: Sequence[str], work: Callable[[], Awaitable[T]]) -> T:
        """Run what fills these partitions; when a storage unit dies with rows of them, empty them and run it again.

        Raises:
            DataLostError: it happened in each of ATTEMPTS attempts.
        """
        for attempt in range(2, ATTEMPTS + 1):
            try:
                return await work()
            except DataLostError as error:
                logger.warning("step %d begins again, attempt %d of %d: %s", step, attempt, ATTEMPTS, error)
                self._tell("on_data_lost", step, attempt, ATTEMPTS)
                for name in partitions:
                    await self._clear(name)
        return await work()

    async def _prepare(self, clock: _Clock, step: int) -> tuple[dict[str, float], list[_Stage]]:
        """Everything before the updates, and the updates, whose rows all ranks have read; none where no prompt teaches anything."""
        metrics = dict[str, float]()
        tagged = await self._sample(clock, step, metrics)
        if not tagged:
            return metrics, []
        lag = self._version - min(int(v or 0) for v in tagged.tag_values("version"))
        rows = StepRows.of(tagged)
        metrics |= {"training/policy_lag": float(lag)} | await self._annotate(clock, step, rows)
        updates = self._updates(step, rows)
        await together(*(clock.time(stage.name, self._read_ahead(stage)) for stage in updates))
        return metrics, updates

    async def _sample(self, clock: _Clock, step: int, metrics: dict[str, float]) -> KVBatchMeta:
        """Scored trajectories to train on, with tags; none where no prompt teaches anything."""
        p, wanted, kept = self._p, self._p.train_order.batch_size, list[str]()
        prompts = self._prompts = list[PromptRef]()
        decision: Generate | Train | GiveUp = Generate(num_prompts=wanted)
        tagged = KVBatchMeta(partition=TRAIN_PARTITION, keys=())
        rounds, failed, truncated = 0, set[str](), 0
        while isinstance(decision, Generate):
            fresh = self._next_prompts(step, len(prompts), decision.num_prompts)
            prompts += fresh
            rounds += 1
            self._tell("on_sample_begin", step, len(fresh))
            rolled = await clock.time(
                "gen", self._rollout(TRAIN_PARTITION, "train", step, fresh, p.rollout.n, self._sampling(), tagged)
            )
            new, truncated = rolled.rows, truncated + rolled.truncated
            self._tell("on_sample_end", step, new)
            metrics["rollout/imbalance"] = max(rolled.imbalance, metrics.get("rollout/imbalance", 1.0))
            tagged = KVBatchMeta.concat([tagged, new]) if tagged else new
            metrics |= course_metrics(tagged) | {"response_length/truncated_ratio": truncated / len(tagged)}
            scored = await clock.time("reward", self._scored("reward", step, new.without_tags()))
            failed |= set(scored.failed)
            metrics |= scored.metrics | {"reward/failures": float(len(failed))}
            if "filter" not in p.graph:
                return _without(tagged, failed)
            if usable := _without(new, failed):
                kept += await clock.time("filter", self._teaching(step, usable.without_tags()))
            decision = next_round(
                kept,
                wanted=wanted,
                generated=len(prompts),
                rounds=rounds,
                max_rounds=p.filter_groups.max_num_gen_batches,
            )
        metrics |= {
            "training/filter_groups/rounds": float(rounds),
            "training/filter_groups/prompts_generated": float(len(prompts)),
            "training/filter_groups/prompts_kept": float(len(decision.uids)),
        }
        chosen = set(decision.uids)
        keep = [i for i, key in enumerate(tagged.keys) if RowKey.parse(key).uid in chosen]
        return _without(tagged.select_rows(keep), failed)

    async def _annotate(self, clock: _Clock, step: int, rows: StepRows) -> dict[str, float]:
        """Everything between scores and updates."""
        metrics: dict[str, float] = {}
        if "baseline" in self._p.graph:
            metrics |= await clock.time("baseline", self._baseline(step, rows.names))
        w = self._p.workers
        stages = [("old_log_prob", w.actor), ("ref", w.ref), ("values", w.critic)]
        forwards = [
            _Stage(name, ranks, forward_calls(name, step, rows, len(ranks), w.shares(ranks)))
            for name, ranks in stages
            if ranks and name in self._p.graph
        ]
        metrics |= await self._side_by_side(clock, forwards, self._forward)
        return metrics | await clock.time("adv", self._reward("adv", step, rows.names))

    def _next_prompts(self, step: int, known: int, count: int) -> list[PromptRef]:
        rows = self._p.train_order.take(self._prompts_taken, count)
        self._prompts_taken += count
        return [PromptRef(f"s{step}-{known + i}", row) for i, row in enumerate(rows)]

    async def _rollout(
        self,
        partition: str,
        split: str,
        step: int,
        prompts: Sequence[PromptRef],
        n: int,
        sampling: SamplingParams,
        before: KVBatchMeta | None = None,
    ) -> _Rolled:
        """Roll these prompts out; `before` are the trajectories of this step that are there already."""
        timeout_s = self._p.loop.stage_timeout_s
        whole = RolloutCall(partition=partition, split=split, step=step, prompts=tuple(prompts), n=n, sampling=sampling)
        results, imbalance = await roll_out(self._p.workers.rollout, whole, self._p.rollout.router, timeout_s)
        writes = [
            name
            for name in self._p.graph["rollout"].writes
            if name in ("responses", "response_mask", "rollout_log_probs")
        ]
        known = set(before.keys) if before else set[str]()
        count = len(known) + sum(result.trajectories for result in results)
        ready = await self._ready(partition, count, writes, step)
        new = sorted(set(ready.keys) - known)  # by name, not by arrival: the same batch in every run
        return _Rolled(ready.select_keys(new), imbalance, sum(result.truncated for result in results))

    async def _ready(self, partition: str, count: int, fields: Sequence[str], step: int) -> KVBatchMeta:
        """The rows of a step, all of which have been put.

        Raises:
            DataLostError: a storage unit took some with it.
        """
        plane, timeout_s = self._p.plane, self._p.loop.stage_timeout_s

        async def wait(seconds: float) -> KVBatchMeta:
            return await plane.wait_ready(
                partition, count=count, fields=fields, where={"step": step}, timeout_s=seconds
            )

        try:
            return await wait(min(_ALL_THERE_S, timeout_s))
        except PlaneTimeout:
            if lost := (await plane.stats()).lost.get(partition):
                raise DataLostError(
                    f"{len(lost)} rows of partition {partition!r}, the first is {lost[0]!r}, were lost with a storage unit."
                ) from None
        return await wait(timeout_s)

    async def _teaching(self, step: int, batch: KVBatchMeta) -> tuple[str, ...]:
        """Uids of the prompts that are worth training on."""
        message = StageCall(step=step, batch=batch)
        return (await call(self._p.workers.reward, "filter", message, FilterResult, self._p.loop.stage_timeout_s)).uids

    async def _baseline(self, step: int, batch: KVBatchMeta) -> dict[str, float]:
        """One greedy response per prompt, scored: the baseline of its other responses."""
        greedy = msgspec.structs.replace(self._sampling(), temperature=0.0)
        uids = {RowKey.parse(key).uid for key in batch.keys}
        prompts = [ref for ref in self._prompts if ref.uid in uids]
        async with self._rows(BASELINE_PARTITION):
            rows = (await self._rollout(BASELINE_PARTITION, "train", step, prompts, 1, greedy)).rows
            await self._scored("reward", step, rows.without_tags())
            return await self._reward("baseline", step, batch)

    def _updates(self, step: int, rows: StepRows) -> list[_Stage]:
        p, w = self._p, self._p.workers
        updates: list[_Stage] = []
        if w.critic:
            schedule = p.critic.schedule(p.rollout.n, p.loop.seed)
            calls = update_calls(step, rows, schedule, self._critic_updates, len(w.critic), w.shares(w.critic))
            updates.append(_Stage("update_critic", w.critic, calls))
        if not w.critic or step > p.critic.warmup_steps:
            schedule = p.actor.schedule(p.rollout.n, p.loop.seed)
            calls = update_calls(step, rows, schedule, self._version, len(w.actor), w.shares(w.actor))
            updates.append(_Stage("update_actor", w.actor, calls))
        return updates

    async def _update(self, clock: _Clock, updates: Sequence[_Stage]) -> dict[str, float]:
        """From here on the step is not repeated: a second update with the same rows would be another update."""
        metrics = await self._side_by_side(clock, updates, self._run)
        self._critic_updates += any(stage.name == "update_critic" for stage in updates)
        self._version += any(stage.name == "update_actor" for stage in updates)
        return metrics

    async def _side_by_side(
        self, clock: _Clock, stages: Sequence[_Stage], work: Callable[[_Stage], Awaitable[dict[str, float]]]
    ) -> dict[str, float]:
        """Stages of different workers at the same time; those of the same workers one after the other, for their ranks wait for each other."""
        lines: dict[int, list[_Stage]] = {}
        for stage in stages:
            lines.setdefault(id(stage.ranks[0]), []).append(stage)

        async def line(mine: Sequence[_Stage]) -> dict[str, float]:
            merged: dict[str, float] = {}
            for stage in mine:
                merged |= await clock.time(stage.name, work(stage))
            return merged

        merged: dict[str, float] = {}
        for result in await together(*(line(mine) for mine in lines.values())):
            merged |= result
        return merged

    async def _forward(self, stage: _Stage) -> dict[str, float]:
        if len(stage.ranks) > 1:  # none may begin while another lacks its rows: it would wait for that one in the stage
            await self._read_ahead(stage)
        return await self._run(stage)

    async def _read_ahead(self, stage: _Stage) -> None:
        await read_ahead(stage.ranks, stage.name, stage.calls, self._p.loop.stage_timeout_s)

    async def _run(self, stage: _Stage) -> dict[str, float]:
        return await run_stage(stage.ranks, stage.name, stage.calls, self._p.loop.stage_timeout_s)

    async def _scored(self, name: str, step: int, batch: KVBatchMeta) -> RewardResult:
        """Have responses scored, to be trained on (reward) or as validation (evaluate); hooks hear of failures."""
        message = StageCall(step=step, batch=batch)
        result = await call(self._p.workers.reward, name, message, RewardResult, self._p.loop.stage_timeout_s)
        if result.failed:
            self._tell("on_reward_failure", step, len(result.failed), len(batch), result.failure)
        return result

    async def _reward(self, name: str, step: int, batch: KVBatchMeta) -> dict[str, float]:
        message = StageCall(step=step, batch=batch)
        return (await call(self._p.workers.reward, name, message, StageResult, self._p.loop.stage_timeout_s)).metrics

    @asynccontextmanager
    async def _rows(self, partition: str) -> AsyncGenerator[None]:
        """The rows of one step, removed when it ends well; after a failure they stay in the plane for inspection."""
        yield
        await self._clear(partition)

    async def _clear(self, partition: str) -> None:
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


def score_of(validation: Mapping[str, float]) -> float | None:
    """What checkpoints are compared by: the mean over data sources of val-core/*/mean@n; None where nothing was validated."""
    found = [value for name, value in validation.items() if name.startswith("val-core/") and "/mean@" in name]
    return sum(found) / len(found) if found else None


def _without(batch: KVBatchMeta, failed: set[str]) -> KVBatchMeta:
    """The trajectories that have scores."""
    return batch.select_keys([key for key in batch.keys if key not in failed]) if failed else batch
