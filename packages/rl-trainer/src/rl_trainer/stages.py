"""The step as a graph of stages that declare which columns they read and write. It is checked before any model loads.

rollout -> reward -> old_log_prob -> ref? -> values? -> adv -> update_critic? -> update_actor -> update_weights -> clear
                                                                                (? where the configuration asks for it)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_protocol import BatchSchema, ConfigError
from rl_protocol.rl_columns import PROMPT_SCHEMA, TRAJECTORY_SCHEMA
from rl_trainer.algorithms.advantages import ADVANTAGE_ESTIMATORS
from rl_trainer.config import ActorConfig, AlgorithmConfig


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the step: only the columns it reads travel to it."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The stages of one step, in order."""

    stages: tuple[Stage, ...]

    def __getitem__(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)

    def __contains__(self, name: object) -> bool:
        return any(stage.name == name for stage in self.stages)


def check_graph(
    stages: Sequence[Stage], schemas: Sequence[BatchSchema] = (PROMPT_SCHEMA, TRAJECTORY_SCHEMA)
) -> StepGraph:
    """Check that every column read was written by an earlier stage, that no column is written twice, and that all are declared.

    Raises:
        ConfigError: names the stage and the column.
    """
    written: dict[str, str] = {}
    for stage in stages:
        for name in stage.reads:
            if name not in written:
                raise ConfigError(f"Stage {stage.name!r} reads column {name!r}, which no earlier stage writes.")
        for name in stage.writes:
            if name in written:
                raise ConfigError(f"Column {name!r} is written by stage {written[name]!r} and again by {stage.name!r}.")
            if not any(name in schema for schema in schemas):
                raise ConfigError(f"Stage {stage.name!r} writes column {name!r}, which no schema declares.")
            written[name] = stage.name
    return StepGraph(tuple(stages))


def needs_critic(algorithm: AlgorithmConfig) -> bool:
    """Whether the advantage estimator reads values."""
    return algorithm.adv_estimator == "gae"


def needs_reference(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether anything reads the reference policy's log-probs."""
    return algorithm.use_kl_in_reward or actor.use_kl_loss


def build_graph(algorithm: AlgorithmConfig, actor: ActorConfig) -> StepGraph:
    """The checked graph of a PPO or GRPO step.

    Raises:
        ConfigError: unknown advantage estimator, or columns that do not fit together.
    """
    if algorithm.adv_estimator not in ADVANTAGE_ESTIMATORS:
        known = ", ".join(ADVANTAGE_ESTIMATORS)
        raise ConfigError(f"algorithm.adv_estimator must be one of {known}; got {algorithm.adv_estimator!r}.")
    critic, ref = needs_critic(algorithm), needs_reference(algorithm, actor)
    tokens = ("prompts", "responses")
    adv_reads = (
        "prompts",
        "responses",
        "response_mask",
        "scores",
        "acc",
        "rollout_log_probs",
        "old_log_probs",
        "entropy",
    )
    stages = [
        Stage(
            "rollout", (), ("prompts", "data_source", "ground_truth", "responses", "response_mask", "rollout_log_probs")
        ),
        Stage("reward", ("responses", "data_source", "ground_truth"), ("scores", "acc")),
        Stage("old_log_prob", tokens, ("old_log_probs", "entropy")),
        *([Stage("ref", tokens, ("ref_log_prob",))] if ref else []),
        *([Stage("values", tokens, ("values",))] if critic else []),
        Stage(
            "adv",
            (*adv_reads, *(("values",) if critic else ()), *(("ref_log_prob",) if ref else ())),
            ("advantages", "returns"),
        ),
        *([Stage("update_critic", (*tokens, "response_mask", "values", "returns"), ())] if critic else []),
        Stage(
            "update_actor",
            (
                *tokens,
                "response_mask",
                "old_log_probs",
                "advantages",
                *(("ref_log_prob",) if actor.use_kl_loss else ()),
            ),
            (),
        ),
    ]
    return check_graph(stages)
