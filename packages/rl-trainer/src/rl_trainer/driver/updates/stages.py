"""The update stages of a step."""

from __future__ import annotations

from dataclasses import dataclass

from rl_trainer.config import ActorConfig, CriticConfig
from rl_trainer.driver.stage_calls import StepRows, Workers, update_calls
from rl_trainer.driver.stage_runner import ModelStage
from rl_trainer.driver.trainer_parts import TrainerParts


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
            schedule, dp_ranks = self.critic.schedule(self.rollout_n, self.seed), self.workers.dp_ranks_of(ranks)
            calls = update_calls(step, rows, schedule, critic_updates, len(ranks), dp_ranks)
            updates.append(ModelStage("update_critic", ranks, calls))
        if not self.workers.critic or step > self.critic.warmup_steps:
            ranks = self.workers.actor
            schedule, dp_ranks = self.actor.schedule(self.rollout_n, self.seed), self.workers.dp_ranks_of(ranks)
            calls = update_calls(step, rows, schedule, version, len(ranks), dp_ranks)
            updates.append(ModelStage("update_actor", ranks, calls))
        return updates
