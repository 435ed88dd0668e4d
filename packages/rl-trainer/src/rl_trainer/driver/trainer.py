"""The training loop: the driver names rows and waits; it never reads a tensor.

rollouts: prompts -> rollout workers -> (replay buffer) -> reward -> filter?
training: log_prob_gap? -> old_log_prob? | ref | values -> adv -> update_critic | update_actor
        -> clear -> update_weights                      (stages joined by | run side by side)

Two pumps run in one TaskGroup. The rollouts sample a turn, the batch of a step or one prompt, once
the training admits it: with async_rl.max_staleness=0 when the training waits for it, otherwise as
many steps before as `rl_trainer.algorithms.staleness_policy` says, which also chooses the turns
that each step trains. Several turns are sampled at once. A weight update waits for the running
generation, or the new weights continue or repeat it (async_rl.on_update).

When a storage unit dies with rows of the step, everything before the updates is repeated with the
same prompts. All ranks read the rows of the updates before the first update begins. From then on
the step needs no rows from the data plane, and it is never repeated.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from rl_protocol import DataLostError, KVBatchMeta, RLError, RolloutError, RowKey
from rl_protocol.counted import counted
from rl_protocol.rl_columns import TRAIN_PARTITION, VALIDATION_PARTITION
from rl_protocol.support.options import require
from rl_trainer.algorithms.metrics import stats
from rl_trainer.algorithms.staleness_policy import StalenessPolicy
from rl_trainer.asyncio_tasks import both, gather_or_cancel
from rl_trainer.checkpoints.checkpoint_folder import Checkpoint, RunState
from rl_trainer.checkpoints.held_batches import HeldBatches
from rl_trainer.driver.batch_queue import (
    MOST_STAGES,
    Admissions,
    BatchQueue,
    GroupCounts,
    SideValidation,
    Staleness,
    Validation,
    future_score,
    one_version,
)
from rl_trainer.driver.batch_sampler import Sampled, Sampler
from rl_trainer.driver.checkpoint_writer import CheckpointWriter, SavedCheckpoint, Score, load
from rl_trainer.driver.held_batches import BatchKeeper
from rl_trainer.driver.hooks import notify
from rl_trainer.driver.idle import IdleClock
from rl_trainer.driver.kept_rows import KeptRows, RecoveredRows
from rl_trainer.driver.old_log_prob import STAGE, AutoOldLogProb
from rl_trainer.driver.plane.moved_bytes import MovedBytes
from rl_trainer.driver.plane.row_hosts import RowFinder
from rl_trainer.driver.stage_calls import StepRows, call
from rl_trainer.driver.stage_runner import Clock, ModelStage, RolloutSleep, StageRunner, noted
from rl_trainer.driver.trainer_parts import TrainerParts
from rl_trainer.driver.updates.batch_files import BatchFiles
from rl_trainer.driver.updates.stages import Updates, forward_stages
from rl_trainer.rollout.trajectory_stats import rollout_metrics
from rl_trainer.workers.columns import BASELINE_PARTITION
from rl_trainer.workers.messages import (
    Partition,
    PromptRef,
    RewardResult,
    SaveCall,
    StageCall,
    StageResult,
    ValidationResult,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")
ATTEMPTS = 4
"""How often the rows of a step or of a validation are generated, if storage units die with them."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step has trained."""

    metrics: dict[str, float]
    actor_updated: bool
    tokens: int
    """Tokens of the trajectories that were trained on, prompts and responses."""
    scores: Mapping[int, tuple[float, float]]
    """Of the prompts that were rolled out for it; see `Sampled.row_scores`."""
    rows: Sequence[str]
    """Keys of the trajectories, also of those that were filtered out."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The updates of a step, whose rows all ranks have read; none if no prompt is informative."""

    updates: Sequence[ModelStage]
    metrics: dict[str, float]
    sampled: Sampled
    tokens: int
    """Tokens of the trajectories, prompts and responses."""
    groups: int
    """Prompts with a trajectory to train on."""


class PPOTrainer:
    """Runs the steps of PPO, GRPO and their relatives over workers, a data plane and a weight sync.

    Lifecycle: build it with `TrainerParts`, await `resume()` to continue from a checkpoint, then
    `fit()`, which returns the metrics of the last validation. The trainer closes none of its parts.

    Raises:
        ConfigError: the number of steps is unknown.
    """

    def __init__(self, parts: TrainerParts) -> None:
        steps = parts.loop.total_training_steps
        require(steps >= 0, "LoopConfig.total_training_steps", "at least 0 where training starts", steps)
        self._idle = IdleClock()
        self._parts = parts = replace(parts, workers=self._idle.watched(parts.workers))
        self._policy = StalenessPolicy.of(
            parts.async_rl,
            parts.train_order.batch_size,
            deterministic=parts.loop.deterministic,
            replicas=len(parts.workers.rollout),
        )
        self._old_log_prob = AutoOldLogProb(parts.old_log_prob_tolerance, parts.loop.seed, parts.loop.stage_timeout_s)
        self._sampler = Sampler(parts, self._policy, self._old_log_prob)
        self._rollouts = self._sampler.rollouts
        self._runner = StageRunner(parts.loop.stage_timeout_s)
        self._updates = Updates.of(parts)
        self._batch_files = BatchFiles(parts) if parts.batches is not None and parts.loop.keep_batches else None
        self._sleep = RolloutSleep(parts.rollout_memory)
        self._longest_wait_s = MOST_STAGES * parts.loop.stage_timeout_s
        self._steps_done = 0
        self._version = 0
        self._critic_updates = 0
        self._kept = KeptRows(parts, self._rollouts)
        self._keeper = BatchKeeper(parts, self._sampler, self._policy)
        self._batches = BatchQueue[Sampled](1, 0, self._longest_wait_s)
        self._restored: dict[int, Sampled] = {}
        self._side = SideValidation(self._longest_wait_s)
        self._trained = 0
        self._counted = Admissions(admitted=0, refilled=0, dropped=0)
        """Those in the metrics of the steps before; prompts are also drawn between steps."""
        self._moved = MovedBytes(parts.plane)
        self._row_finder = RowFinder(parts)
        self._turns: Sequence[int] = ()
        """What the newest step trains."""

    async def resume(self, checkpoint: Checkpoint | None) -> RecoveredRows:
        """Restore the workers' state, the rollout weights, the place in the run, and the batches
        that were sampled; for these the replay buffers must be open. None: from the beginning, with
        the rollout weights of a policy that starts from an adapter.

        With `TrainerParts.keep_rows`, rows in the data plane are used again; returns which.

        Raises:
            ConfigError: the checkpoint belongs to another model, or the rows to another run.
            RLError: a part failed.
        """
        if checkpoint is None:
            await self._sync_rollouts()
            return await self._kept.recover(0, None)
        parts, state = self._parts, checkpoint.run_state
        await load(checkpoint, parts.workers, parts.loop.stage_timeout_s)
        self._steps_done, self._version = state.step, state.version
        self._critic_updates, self._rollouts.version = state.critic_updates, self._version
        held = checkpoint.held
        recovered = await self._kept.recover(state.step * self._policy.turns_per_step, held)
        held = None if recovered.held else self._keeper.usable(held, self._version)
        drawn = {batch.turn: batch.places for batch in held.batches} if held else None
        self._sampler.draws.restore(state.prompts_taken, state.prompts_untrained, drawn)
        if state.prompt_order:
            parts.train_order.restore(state.prompt_order)
        if held is not None:
            self._restored = await self._keeper.restore(held, checkpoint.folder, self._version)
        self._old_log_prob.agree = state.log_probs_agree
        await self._sync_rollouts()
        return recovered

    async def _sync_rollouts(self) -> None:
        """Send the rollouts the policy, unless they have loaded it."""
        sync = self._parts.weight_sync
        if sync is not None and (self._version or self._parts.sync_first):
            await sync.update_weights(self._version)

    async def fit(self) -> dict[str, float]:
        """Train up to the configured number of steps, counting those before a checkpoint.

        Raises:
            RLError: a part failed; the loop stops at the first failure.
        """
        checkpoints = self._parts.checkpoints
        try:
            self._notify("on_train_begin", self._steps_done)
            last = await self._run_pumps()
            if checkpoints is not None:
                with noted("stage save_checkpoint"):
                    await self._published(checkpoints, await checkpoints.finish())
            self._notify("on_train_end", self._steps_done)
        except (RLError, asyncio.CancelledError) as error:
            if checkpoints is not None:
                await checkpoints.abandon(wait=isinstance(error, RLError))
            raise
        return last

    async def _run_pumps(self) -> dict[str, float]:
        """Run both pumps; the first failure ends both."""
        self._batches = BatchQueue(
            self._steps_done * self._policy.turns_per_step + len(self._restored) + 1,
            self._parts.loop.total_training_steps * self._policy.turns_per_step,
            self._longest_wait_s,
            one_by_one=self._policy.deterministic,
            ready=self._restored,
        )
        try:
            async with asyncio.TaskGroup() as pumps:
                rollouts = pumps.create_task(self._run_rollouts(pumps))
                last = await self._run_training(pumps)
                rollouts.cancel()
        except* RLError as failed:
            raise failed.exceptions[0] from None
        counts = self.group_counts()
        logger.info("%s", counts)
        counts.check()
        return last

    async def _run_rollouts(self, pumps: asyncio.TaskGroup) -> None:
        """Begin to sample each turn once it is admitted."""
        while True:
            turn = await self._batches.begin()
            pumps.create_task(self._sample(turn))

    async def _sample(self, turn: int) -> None:
        """Sample the batch of a turn, and hand it over."""
        try:
            with noted(f"step {self._policy.step_of(turn)}"):
                sampled = await self._sampler.sample(turn)
        except DataLostError as error:
            await self._batches.finish(turn, error)
        else:
            await self._batches.finish(turn, sampled)

    async def _run_training(self, pumps: asyncio.TaskGroup) -> dict[str, float]:
        """Train on one batch after the other; returns the metrics of the last validation."""
        loop = self._parts.loop
        last: dict[str, float] = {}
        validates = self._parts.validation_size > 0
        if validates and loop.val_before_train and not self._steps_done:
            with self._idle.because("validation"):
                last = (await self.validate(0)).metrics
            self._parts.on_step(0, last)
        self._idle.read()  # what was before the first step belongs to none
        for step in range(self._steps_done + 1, loop.total_training_steps + 1):
            self._notify("on_step_begin", step)
            with noted(f"step {step}"):
                metrics = await self._step(step)
            final, score, beside = step == loop.total_training_steps, None, None
            with self._idle.because("validation"):
                await self._side.over()
                start = time.perf_counter()
                if validates and (final or (loop.test_freq and step % loop.test_freq == 0)):
                    if final or not self._policy.max_staleness:
                        validation = await self.validate(step)
                        last, score = validation.metrics, validation.accuracy
                        metrics |= last | {"timing_s/testing": time.perf_counter() - start}
                    else:
                        beside = pumps.create_task(self.validate(step))
                        score = future_score(beside)
            self._steps_done = step
            with noted(f"step {step}"), noted("stage save_checkpoint"), self._idle.busy("trainer"):
                metrics |= await self._save(final, score)
            metrics |= self._idle.read()
            if beside is None:
                self._parts.on_step(step, metrics)
            else:
                self._side.begin(pumps.create_task(self._report(step, metrics, beside, start)))
            self._notify("on_step_end", step, metrics)
        return last

    async def _report(
        self, step: int, metrics: Mapping[str, float], beside: asyncio.Task[Validation], start: float
    ) -> None:
        """Log the metrics of a step with those of its validation, once this is done."""
        validation = await beside
        seconds = time.perf_counter() - start
        self._parts.on_step(step, {**metrics, **validation.metrics, "timing_s/testing": seconds})

    async def _save(self, final: bool, score: Score) -> dict[str, float]:
        """Begin a checkpoint if one is due; returns metrics of a finished one, and the time that
        the loop waited.
        """
        loop, writer = self._parts.loop, self._parts.checkpoints
        if writer is None:
            return {}
        start = time.perf_counter()
        if not (final or (loop.save_freq and self._steps_done % loop.save_freq == 0)):
            return await self._published(writer, writer.poll())
        metrics = await self._published(writer, await writer.finish())
        self._notify("on_checkpoint_begin", self._steps_done)
        held = await self._hold()
        state = RunState(
            step=self._steps_done,
            version=self._version,
            critic_updates=self._critic_updates,
            prompts_taken=self._sampler.draws.position,
            prompts_untrained=self._sampler.draws.untrained,
            prompt_order=self._parts.train_order.state,
            log_probs_agree=self._old_log_prob.agree,
        )
        await writer.begin(state, score, held)
        return metrics | {"timing_s/save_checkpoint": time.perf_counter() - start}

    async def _hold(self) -> HeldBatches | None:
        """Wait until all admitted turns are sampled, and copy their batches for a checkpoint."""
        if not self._policy.max_staleness:
            return None
        await self._batches.sampled()
        if self._batches.halted:
            logger.warning("The checkpoint of step %d has no sampled batches: rows were lost.", self._steps_done)
            return None
        return await self._keeper.hold(self._steps_done, self._batches.waiting())

    async def _published(self, writer: CheckpointWriter, saved: SavedCheckpoint | None) -> dict[str, float]:
        """Release the rows of a published checkpoint, and notify the hooks; returns its metrics."""
        if saved is None:
            return {}
        await self._kept.release(saved.step)
        self._notify("on_checkpoint_end", saved.step, writer.folder_of(saved.step))
        return saved.metrics()

    def _notify(self, event: str, *facts: object) -> None:
        notify(self._parts.hooks, event, *facts)

    def group_counts(self) -> GroupCounts:
        """What has become of the prompts that were rolled out for training."""
        held = self._parts.buffers[TRAIN_PARTITION].counts()
        return GroupCounts(
            finished=self._sampler.finished,
            trained=self._trained,
            dropped=self._sampler.dropped,
            held=held["finished"] + held["taken"] - self._kept.groups - self._rollouts.unused(TRAIN_PARTITION),
        )

    async def _step(self, step: int) -> dict[str, float]:
        """Train one step; returns its metrics."""
        clock, metrics = Clock(), {"training/global_step": float(step)}
        bytes_before, cpu_before, start = self._driver_bytes(), time.process_time(), time.perf_counter()
        await self._batches.admit(self._policy.last_admitted(step))
        result = await self._train(clock, step)
        metrics |= result.metrics
        synced, _ = await both(self._update_weights(clock, result), self._kept.trained(step, self._turns, result.rows))
        metrics |= synced or {}
        if self._policy.deterministic:
            await self._batches.sampled()  # the turns that are admitted draw without these scores
        metrics |= self._parts.train_order.observe(step, result.scores)
        if self._policy.max_staleness:
            admissions = self._admissions()
            metrics |= admissions.metrics(self._counted)
            self._counted = admissions
        elapsed = time.perf_counter() - start
        metrics |= clock.seconds | {"timing_s/step": elapsed, "perf/time_per_step": elapsed}
        metrics["perf/throughput"] = result.tokens / elapsed
        metrics["perf/driver_cpu_s"] = time.process_time() - cpu_before
        metrics["perf/driver_bytes"] = float(self._driver_bytes() - bytes_before)
        return metrics | await self._moved.read()

    async def _update_weights(self, clock: Clock, result: StepResult) -> dict[str, float]:
        """Send the new weights to the replicas, if there are any; returns metrics.

        With async_rl.on_update=finish the running generation ends first. Otherwise the replicas
        change their weights below it.
        """
        sync = self._parts.weight_sync
        if sync is None or not result.actor_updated:
            await self._sleep.wake(clock, "kv_cache")
            self._rollouts.version = self._version
            return {}
        with self._idle.because("refit"):
            if self._policy.drops:
                await self._sampler.drop_too_late(self._batches, self._version)
            if self._policy.deterministic:
                await self._batches.sampled()
            with self._idle.because("validation"):
                await self._side.rolled_out()
            async with self._rollouts.gate.closed(drain=self._policy.drains):
                await self._sleep.wake(clock, "weights")
                report = await clock.time("update_weights", sync.update_weights(self._version))
                await self._sleep.wake(clock, "kv_cache")
                self._rollouts.version = self._version
        return {
            "weight_sync/bytes": float(report.num_bytes),
            "weight_sync/version": float(report.version),
            "weight_sync/receivers": float(len(report.receivers)),
        }

    async def validate(self, step: int) -> Validation:
        """Roll out the validation set with rollout.val_kwargs; report accuracy by data source."""
        settings = self._parts.rollout.val_kwargs
        self._notify("on_validate_begin", step)
        prompts = [PromptRef(f"v{step}-{row}", row) for row in range(self._parts.validation_size)]
        sampling = msgspec.structs.replace(
            self._sampler.sampling(trains=False), temperature=settings.temperature, top_p=1.0, top_k=0, ignore_eos=False
        )
        partition = Partition(name=VALIDATION_PARTITION, split="val", step=step, n=settings.n, sampling=sampling)

        async def evaluate() -> Validation:
            with self._side.rolling_out():
                rows = (await self._sampler.roll_out(partition, prompts)).rows
            judged = await self._sampler.score("evaluate", ValidationResult, step, rows.without_tags())
            rolled = {f"val-aux/{name}": value for name, value in rollout_metrics(rows).items()}
            if self._policy.max_staleness:
                rolled["val-aux/version"] = float(one_version(rows))
            return Validation(judged.metrics | rolled, judged.accuracy)

        with noted(f"validation after step {step}"):
            async with self._rollouts.committed_after(VALIDATION_PARTITION, step):
                validation = await self._repeated(step, evaluate, lambda: self._rollouts.clear(VALIDATION_PARTITION))
        self._notify("on_validate_end", step, validation.metrics)
        return validation

    async def save(self, path: Path) -> None:
        """Have the actor write a Hugging Face checkpoint folder at this absolute path."""
        message, timeout_s = SaveCall(path=str(path)), self._parts.loop.stage_timeout_s
        await gather_or_cancel(
            *(call(rank, "save", message, StageResult, timeout_s) for rank in self._parts.workers.actor)
        )

    # -- the parts of a step
    async def _train(self, clock: Clock, step: int) -> StepResult:
        """Everything of a step but the weight sync and the commit of its rows."""

        async def prepare() -> _Prepared:
            def select(ready: Mapping[int, Sampled]) -> Sequence[int] | None:
                return self._sampler.select(step, ready, self._batches.sampling, self._version)

            batches = await self._batches.get(step, select)
            self._turns = list(batches)
            return await self._prepare(clock, step, Sampled.joined(list(batches.values())))

        async def rewind() -> None:
            async with self._batches.rewound():
                await self._rollouts.clear(TRAIN_PARTITION, keep=self._kept.turns)
                await self._rollouts.clear(BASELINE_PARTITION)
                self._sampler.rewind()
                self._sampler.dropped = self._sampler.finished - self._trained

        prepared = await (
            self._kept.unless_lost(prepare) if self._parts.keep_rows else self._repeated(step, prepare, rewind)
        )
        # from here on the step is not repeated: the same rows again would be a second update
        self._old_log_prob.note(prepared.metrics)
        updated = {stage.name for stage in prepared.updates}
        metrics = dict(prepared.metrics)
        if updated:
            metrics |= await self._sleep.begin(clock, weights_follow="update_actor" in updated)
        found = await self._runner.update(clock, prepared.updates)
        if self._batch_files is not None:
            kept = self._batch_files.publish(step, self._version, self._critic_updates, found)
            await clock.time("keep_batch", kept)
        metrics |= found
        if "actor/entropy_loss" in metrics:  # the old_log_prob stage computes the entropy, if it runs
            metrics.setdefault("actor/entropy", metrics["actor/entropy_loss"])
        self._critic_updates += "update_critic" in updated
        self._version += "update_actor" in updated
        for turn in self._turns:
            self._sampler.trained(turn)
        self._trained += prepared.groups
        self._sampler.dropped += prepared.sampled.groups - prepared.groups
        actor_updated, scores = "update_actor" in updated, prepared.sampled.row_scores
        rows = [*prepared.sampled.rows.keys, *prepared.sampled.unused]
        return StepResult(metrics, actor_updated=actor_updated, tokens=prepared.tokens, scores=scores, rows=rows)

    async def _repeated(self, step: int, work: Callable[[], Awaitable[T]], clear: Callable[[], Awaitable[None]]) -> T:
        """Fill partitions; when a storage unit dies with their rows, clear them and repeat the
        work.

        Raises:
            DataLostError: rows were lost in each of ATTEMPTS attempts.
        """
        for attempt in range(2, ATTEMPTS + 1):
            try:
                return await work()
            except DataLostError as error:
                logger.warning("step %d begins again, attempt %d of %d: %s", step, attempt, ATTEMPTS, error)
                self._notify("on_data_lost", step, attempt, ATTEMPTS)
                await clear()
        return await work()

    async def _prepare(self, clock: Clock, step: int, sampled: Sampled) -> _Prepared:
        """Run everything between sampling and the updates."""
        workers = self._parts.workers
        ranks = max(workers.dp_ranks_of(workers.actor)) + 1
        if len(sampled.rows) < ranks:
            if sampled.rows:
                logger.warning(
                    "step %d has %s for %d ranks, and trains no row", step, counted(len(sampled.rows), "row"), ranks
                )
            return _Prepared((), sampled.metrics, sampled, tokens=0, groups=0)
        ages = self._staleness(sampled.rows)
        metrics = sampled.metrics | ages.metrics()
        if self._policy.max_staleness:
            metrics |= self._ahead()
        rows, compared = await self._choose_log_probs(clock, step, sampled, max(ages.oldest))
        metrics |= compared | await self._annotate(clock, step, rows, sampled.prompts)
        updates = self._updates.stages(step, rows, version=self._version, critic_updates=self._critic_updates)
        await self._runner.read_ahead(clock, updates)
        if self._batch_files is not None:
            await clock.time("keep_batch", self._batch_files.copy(step, sampled.rows, rows))
        groups = len(set(sampled.rows.tag_values("uid")))
        return _Prepared(updates, metrics, sampled, tokens=int(rows.lengths.sum()), groups=groups)

    def _admissions(self) -> Admissions:
        sampler = self._sampler
        overtaken = {self._policy.on_update: sampler.overtaken}
        return Admissions(
            admitted=sampler.admitted,
            refilled=sampler.refilled,
            dropped=sampler.dropped,
            continued=overtaken.get("continue", 0),
            restarted=overtaken.get("abort", 0),
        )

    def _ahead(self) -> dict[str, float]:
        """How old what is generated now, and what waits for its step, is already."""
        in_flight = [self._version - version for version in self._rollouts.in_flight(TRAIN_PARTITION)]
        waiting = (
            Staleness.of(batch.rows, self._version).oldest for batch in self._batches.waiting().values() if batch.rows
        )
        in_queue = [age for ages in waiting for age in ages]
        return stats("async/in_flight_staleness", in_flight) | stats("async/in_queue_staleness", in_queue)

    def _staleness(self, rows: KVBatchMeta) -> Staleness:
        """Versions between the weights that generated the trajectories and those they train.

        Raises:
            RolloutError: a trajectory has no version, or is older than AsyncConfig.max_staleness.
        """
        ages = Staleness.of(rows, self._version)
        bound, oldest = self._policy.max_staleness, max(ages.oldest)
        if self._parts.weight_sync is not None and self._policy.too_old(oldest):
            raise RolloutError(
                f"Trajectory {rows.keys[ages.oldest.index(oldest)]!r} was generated with version {self._version - oldest} of the weights and would "
                f"train version {self._version}; AsyncConfig.max_staleness={bound} allows {counted(bound, 'version')} between them."
            )
        return ages

    async def _choose_log_probs(
        self, clock: Clock, step: int, sampled: Sampled, lag: int
    ) -> tuple[StepRows, dict[str, float]]:
        """The rows with the choice of their old log-probs, and its metrics."""
        rows, gap, auto = await self._row_finder.placed(StepRows.of(sampled.rows)), sampled.gap, self._old_log_prob
        metrics = {"old_log_prob/recomputed": float("old_log_prob" in self._parts.graph)}
        if gap is None and STAGE in self._parts.graph:
            gap = await auto.compare(clock, step, sampled.rows, self._parts.workers, lag)
        if gap is None or not auto.agrees(gap.metrics()):
            return rows, metrics
        return rows.with_rollout_log_probs(), {"old_log_prob/recomputed": 0.0, **gap.metrics()}

    async def _annotate(
        self, clock: Clock, step: int, rows: StepRows, prompts: Sequence[PromptRef]
    ) -> dict[str, float]:
        """Run the stages between scores and updates."""
        metrics: dict[str, float] = {}
        graph, workers = self._parts.graph, self._parts.workers
        if "baseline" in graph:
            metrics |= await clock.time("baseline", self._baseline(step, rows.names, prompts))
        forwards = forward_stages(step, rows, graph, workers)
        metrics |= await self._runner.forward(clock, forwards)
        return metrics | await clock.time("adv", self._reward_stage("adv", step, rows.names))

    async def _baseline(self, step: int, batch: KVBatchMeta, prompts: Sequence[PromptRef]) -> dict[str, float]:
        """Score one greedy response per prompt: the baseline of its other responses."""
        greedy = msgspec.structs.replace(self._sampler.sampling(trains=False), temperature=0.0)
        partition = Partition(name=BASELINE_PARTITION, split="train", step=step, n=1, sampling=greedy)
        uids = {RowKey.parse(key).uid for key in batch.keys}
        async with self._rollouts.committed_after(BASELINE_PARTITION, step):
            once = [PromptRef(ref.uid, ref.row) for ref in prompts if ref.uid in uids]
            rows = (await self._sampler.roll_out(partition, once)).rows
            await self._sampler.score("reward", RewardResult, step, rows.without_tags())
            return await self._reward_stage("baseline", step, batch)

    async def _reward_stage(self, name: str, step: int, batch: KVBatchMeta) -> dict[str, float]:
        message, timeout_s = StageCall(step=step, batch=batch), self._parts.loop.stage_timeout_s
        return (await call(self._parts.workers.reward, name, message, StageResult, timeout_s)).metrics

    def _driver_bytes(self) -> int:
        """Bytes through this process: worker calls and answers, and its data plane client's
        traffic.
        """
        return sum(w.bytes_moved for w in self._parts.workers.all()) + self._parts.plane.traffic().total
