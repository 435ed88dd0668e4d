"""Samples the batch of a step: rolls prompts out, scores the responses and filters them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from rl_protocol import KVBatchMeta, RowKey
from rl_protocol.ports import SamplingParams
from rl_protocol.rl_columns import TRAIN_PARTITION
from rl_trainer.algorithms.dapo import Generate, GiveUp, Train, next_round
from rl_trainer.algorithms.staleness_policy import StalenessPolicy
from rl_trainer.data.prompt_draws import PromptDraws
from rl_trainer.driver.hooks import notify
from rl_trainer.driver.rollouts import RolledOut, Rollouts, Spare
from rl_trainer.driver.stage_calls import call
from rl_trainer.driver.stage_runner import Clock
from rl_trainer.driver.trainer_parts import TrainerParts
from rl_trainer.rollout.trajectory_stats import rollout_metrics
from rl_trainer.workers.messages import FilterResult, Partition, PromptRef, RewardResult, StageCall

Scoring = TypeVar("Scoring", bound=RewardResult)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The batch of a step.

    Attributes:
        rows: scored trajectories to train on, with tags; none if no prompt is informative.
        prompts: all prompts that were rolled out.
        groups: how many prompts have responses in the data plane.
        metrics: of the step.
    """

    rows: KVBatchMeta
    prompts: Sequence[PromptRef]
    groups: int
    metrics: dict[str, float]


class Sampler:
    """Rolls out and scores prompts with the weights that the rollout replicas have.

    Args:
        parts: of the run.
        policy: how far sampling runs ahead.

    Attributes:
        rollouts: the rollout workers.
        draws: the prompts that each step has drawn.
        finished: prompts that were rolled out for training.
        admitted: prompts that steps have drawn.
        refilled: those of them that were drawn in the place of others.
        overtaken: prompts with a response during which the weights changed.
    """

    def __init__(self, parts: TrainerParts, policy: StalenessPolicy) -> None:
        self._parts = parts
        self.rollouts = Rollouts(
            parts.plane,
            parts.workers.rollout,
            parts.buffers,
            policy=policy,
            replay=parts.replay,
            router=parts.rollout.router,
            timeout_s=parts.loop.stage_timeout_s,
        )
        self.draws = PromptDraws(parts.train_order)
        self.finished = self.admitted = self.refilled = self.overtaken = 0

    async def sample(self, step: int) -> Sampled:
        """Roll prompts out and score them, until there are enough informative ones."""
        clock, parts, wanted = Clock(), self._parts, self._parts.train_order.batch_size
        partition = Partition(
            name=TRAIN_PARTITION, split="train", step=step, n=parts.rollout.n, sampling=self.sampling()
        )
        metrics, prompts, kept = dict[str, float](), list[PromptRef](), list[str]()
        decision: Generate | Train | GiveUp = Generate(num_prompts=wanted)
        rows = KVBatchMeta(partition=TRAIN_PARTITION, keys=())
        rounds, generated, groups, failed, truncated = 0, 0, 0, set[str](), 0

        def draw(count: int) -> Sequence[PromptRef]:
            fresh = self._next_prompts(step, len(prompts), count)
            self.admitted += count
            self.refilled += count if prompts else 0
            prompts.extend(fresh)
            return fresh

        while isinstance(decision, Generate):
            fresh = draw(decision.num_prompts)
            rounds, generated = rounds + 1, generated + len(fresh)
            self._notify("on_sample_begin", step, len(fresh))
            rolled = await clock.time("gen", self.roll_out(partition, fresh, draw))
            add_failures(metrics, rolled)
            groups += rolled.groups
            self.finished += rolled.groups
            self.overtaken += rolled.overtaken
            new, truncated = rolled.rows, truncated + rolled.truncated
            self._notify("on_sample_end", step, new)
            metrics["rollout/imbalance"] = max(rolled.imbalance, metrics.get("rollout/imbalance", 1.0))
            rows = KVBatchMeta.concat([rows, new]) if rows else new
            metrics |= rollout_metrics(rows) | {"response_length/truncated_ratio": truncated / len(rows)}
            scored = await clock.time("reward", self.score("reward", RewardResult, step, new.without_tags()))
            failed |= set(scored.failed)
            metrics |= scored.metrics | {"reward/failures": float(len(failed))}
            if "filter" not in parts.graph:
                return Sampled(_without(rows, failed), prompts, groups, metrics | clock.seconds)
            if usable := _without(new, failed):
                kept += await clock.time("filter", self._informative(step, usable.without_tags()))
            decision = next_round(
                kept,
                wanted=wanted,
                generated=generated,
                rounds=rounds,
                max_rounds=parts.filter_groups.max_num_gen_batches,
            )
        metrics |= clock.seconds | {
            "training/filter_groups/rounds": float(rounds),
            "training/filter_groups/prompts_generated": float(generated),
            "training/filter_groups/prompts_kept": float(len(decision.uids)),
        }
        chosen = set(decision.uids)
        keep = [i for i, key in enumerate(rows.keys) if RowKey.parse(key).uid in chosen]
        return Sampled(_without(rows.select_rows(keep), failed), prompts, groups, metrics)

    async def roll_out(
        self, partition: Partition, prompts: Sequence[PromptRef], spare: Spare | None = None
    ) -> RolledOut:
        """Roll prompts out; notify hooks of failures."""
        rolled = await self.rollouts.roll_out(partition, prompts, spare)
        if rolled.failures:
            self._notify("on_rollout_failure", partition.step, rolled.failures, rolled.replaced)
        return rolled

    def adopt(self, step: int, uids: Sequence[str]) -> None:
        """Count groups of a step that were sampled before a restart, and are taken again."""
        self.rollouts.adopt(TRAIN_PARTITION, step, uids)
        self.finished += len(uids)

    async def score(self, name: str, answer: type[Scoring], step: int, batch: KVBatchMeta) -> Scoring:
        """Score responses, for training (`reward`) or validation (`evaluate`); notify hooks of
        failures.
        """
        message, timeout_s = StageCall(step=step, batch=batch), self._parts.loop.stage_timeout_s
        result = await call(self._parts.workers.reward, name, message, answer, timeout_s)
        if result.failed:
            self._notify("on_reward_failure", step, len(result.failed), len(batch), result.failure)
        return result

    def sampling(self) -> SamplingParams:
        """How training responses are sampled."""
        return self._parts.rollout.sampling(self._parts.loop.seed)

    def _next_prompts(self, step: int, known: int, count: int) -> list[PromptRef]:
        rows = self.draws.draw(step, count)
        return [PromptRef(f"s{step}-{known + i}", row) for i, row in enumerate(rows)]

    async def _informative(self, step: int, batch: KVBatchMeta) -> tuple[str, ...]:
        """Uids of the prompts that are worth training on."""
        message, timeout_s = StageCall(step=step, batch=batch), self._parts.loop.stage_timeout_s
        return (await call(self._parts.workers.reward, "filter", message, FilterResult, timeout_s)).uids

    def _notify(self, event: str, *facts: object) -> None:
        notify(self._parts.hooks, event, *facts)


def add_failures(metrics: dict[str, float], rolled: RolledOut) -> None:
    """Add the failures of a rollout to those of earlier ones in `metrics`."""
    outcomes = [failure.outcome for failure in rolled.failures]
    counts = {
        "replay/failed_sessions": sum(failure.sessions for failure in rolled.failures),
        "replay/retried_prompts": outcomes.count("retried"),
        "replay/partial_prompts": outcomes.count("partial"),
        "replay/replaced_prompts": rolled.replaced,
    }
    for name, count in counts.items():
        metrics[name] = metrics.get(name, 0.0) + count


def _without(batch: KVBatchMeta, failed: set[str]) -> KVBatchMeta:
    """The trajectories that have scores."""
    return batch.select_keys([key for key in batch.keys if key not in failed]) if failed else batch
