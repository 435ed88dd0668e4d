"""The stages of a step that run models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_trainer.config import ActorConfig, CriticConfig
from rl_trainer.config.optim import Schedule
from rl_trainer.driver.stage_calls import StepRows, WorkerHandle, Workers, forward_calls, update_calls
from rl_trainer.driver.stage_runner import ModelStage
from rl_trainer.driver.trainer_parts import TrainerParts
from rl_trainer.graph.stages import StepGraph


@dataclass(frozen=True, kw_only=True, slots=True)
class Updates:
    """What the calls of the updates depend on, besides their rows."""

    workers: Workers
    actor: ActorConfig
    critic: CriticConfig
    rollout_n: int
    """Responses per prompt."""
    seed: int

    @classmethod
    def of(cls, parts: TrainerParts) -> Updates:
        """Of a run with these parts."""
        return cls(
            workers=parts.workers,
            actor=parts.actor,
            critic=parts.critic,
            rollout_n=parts.rollout.n,
            seed=parts.loop.seed,
        )

    def stages(self, step: int, rows: StepRows, *, version: int, critic_updates: int) -> list[ModelStage]:
        """The stages that update the models of a run on these rows.

        Args:
            step: number of the step.
            rows: what it trains on.
            version: updates of the actor before.
            critic_updates: those of the critic.
        """
        updates: list[ModelStage] = []
        if ranks := self.workers.critic:
            schedule = self.critic.schedule(self.rollout_n, self.seed)
            updates.append(self._stage("update_critic", step, rows, ranks, schedule, critic_updates))
        if not self.workers.critic or step > self.critic.warmup_steps:
            schedule = self.actor.schedule(self.rollout_n, self.seed)
            updates.append(self._stage("update_actor", step, rows, self.workers.actor, schedule, version))
        return updates

    def _stage(
        self, name: str, step: int, rows: StepRows, ranks: Sequence[WorkerHandle], schedule: Schedule, count: int
    ) -> ModelStage:
        workers = self.workers
        dp_ranks, hosts = workers.dp_ranks_of(ranks), workers.hosts_of(ranks)
        return ModelStage(name, ranks, update_calls(step, rows, schedule, count, len(ranks), dp_ranks, hosts))


def forward_stages(step: int, rows: StepRows, graph: StepGraph, workers: Workers) -> list[ModelStage]:
    """The stages before the updates that run models on these rows.

    Args:
        step: number of the step.
        rows: what it trains on.
        graph: the stages of the run.
        workers: of the run.

    Raises:
        BatchError: see `forward_calls`.
    """
    stages = [("old_log_prob", workers.actor), ("ref", workers.ref), ("values", workers.critic)]
    found: list[ModelStage] = []
    for name, ranks in stages:
        if ranks and name in graph and not (name == "old_log_prob" and rows.has_rollout_log_probs):
            dp_ranks, hosts = workers.dp_ranks_of(ranks), workers.hosts_of(ranks)
            found.append(ModelStage(name, ranks, forward_calls(name, step, rows, len(ranks), dp_ranks, hosts)))
    return found
