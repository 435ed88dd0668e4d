"""The step as a graph of stages: worker methods, which declare their columns with `tqbridge`.

It is checked before any model loads.

rollout -> reward -> filter? -> baseline? -> log_prob_gap? -> old_log_prob? -> ref? -> values?
        -> adv -> update_critic? -> update_actor -> update_weights -> clear
                                                    (? if the configuration needs it)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_protocol import BatchSchema, ConfigError
from rl_protocol.bridge import Declaration, check_flow, declaration
from rl_protocol.rl_columns import PROMPT_SCHEMA
from rl_trainer.algorithms.advantages import estimators_read
from rl_trainer.algorithms.old_log_prob import old_log_prob_mode, starts_from_rollout
from rl_trainer.config import ActorConfig, AlgorithmConfig
from rl_trainer.workers.actor import ActorWorker, ReferenceWorker
from rl_trainer.workers.advantage import AdvantageStages
from rl_trainer.workers.columns import TRAINER_SCHEMA, StepColumns, step_columns
from rl_trainer.workers.critic import CriticWorker
from rl_trainer.workers.reward import RewardWorker
from rl_trainer.workers.rollout import RolloutWorker


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The stages of one step, in order."""

    stages: tuple[Declaration, ...]

    def __getitem__(self, name: str) -> Declaration:
        return next(stage for stage in self.stages if stage.name == name)

    def __contains__(self, name: object) -> bool:
        return any(stage.name == name for stage in self.stages)


def check_graph(
    stages: Sequence[Declaration], schemas: Sequence[BatchSchema] = (PROMPT_SCHEMA, TRAINER_SCHEMA)
) -> StepGraph:
    """Check that every column is declared, written once, and written before it is read.

    Raises:
        ConfigError: names the stage and the column.
    """
    check_flow(stages)
    for stage in stages:
        for name in stage.writes:
            if not any(name in schema for schema in schemas):
                raise ConfigError(f"Step {stage.name!r} writes column {name!r}, which no schema declares.")
    return StepGraph(tuple(stages))


def needs_critic(algorithm: AlgorithmConfig) -> bool:
    """Whether the advantage estimator reads values."""
    return "values" in estimators_read(algorithm)


def needs_baseline(algorithm: AlgorithmConfig) -> bool:
    """Whether the advantage estimator reads the score of a greedy response."""
    return "reward_baselines" in estimators_read(algorithm)


def needs_sum_pi_squared(algorithm: AlgorithmConfig) -> bool:
    """Whether the advantage estimator reads sums of squared probabilities."""
    return "sum_pi_squared" in estimators_read(algorithm)


def needs_reference(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether anything reads the reference policy's log-probs."""
    return bool(step_columns(algorithm, actor).reference)


def build_graph(
    algorithm: AlgorithmConfig, actor: ActorConfig, *, images: bool = False, kept: bool = False
) -> StepGraph:
    """The checked graph of a step; `images` and `kept` as for `step_columns`.

    With algorithm.old_log_prob=auto, its stage `old_log_prob` runs in some steps, and the graph of
    the others is checked as well.

    Raises:
        ConfigError: the advantage estimator or policy loss is unknown, or columns do not fit
            together.
    """
    columns, mode = step_columns(algorithm, actor, images=images, kept=kept), old_log_prob_mode(algorithm)
    if not columns.advantages:
        return check_graph(_stages(algorithm, actor, columns, samples=False, recomputes=False))
    if mode == "auto":
        check_graph(_stages(algorithm, actor, columns.with_rollout_log_probs(), samples=True, recomputes=False))
    return check_graph(
        _stages(algorithm, actor, columns, samples=mode == "auto", recomputes=not starts_from_rollout(mode))
    )


def _stages(
    algorithm: AlgorithmConfig, actor: ActorConfig, columns: StepColumns, *, samples: bool, recomputes: bool
) -> list[Declaration]:
    rollout = [
        declaration(method, columns) for method in (RolloutWorker.write_prompts, RolloutWorker.write_trajectories)
    ]
    stages = [Declaration("rollout", (), tuple(name for part in rollout for name in part.writes))]
    critic = needs_critic(algorithm)
    methods: list[tuple[Callable[..., Any], bool]] = [
        (RewardWorker.reward, True),
        (AdvantageStages.filter, bool(columns.filter)),
        (AdvantageStages.baseline, needs_baseline(algorithm)),
        (ActorWorker.log_prob_gap, samples),
        (ActorWorker.old_log_prob, recomputes),
        (ReferenceWorker.ref, needs_reference(algorithm, actor)),
        (CriticWorker.values, critic),
        (AdvantageStages.adv, True),
        (CriticWorker.update_critic, critic),
        (ActorWorker.update_actor, True),
    ]
    return stages + [declaration(method, columns) for method, runs in methods if runs]
