"""The step graph of the trainer, with the columns that a family adds."""

from __future__ import annotations

import dataclasses

from ppo_step.payloads import Family
from rl_protocol.bridge import Declaration
from rl_protocol.rl_columns import PROMPT_SCHEMA
from rl_trainer.config import ActorConfig, AlgorithmConfig
from rl_trainer.graph.stages import StepGraph, build_graph, check_graph
from rl_trainer.workers.columns import TRAINER_SCHEMA

ALGORITHM = AlgorithmConfig(old_log_prob="recompute")
ACTOR = ActorConfig(use_kl_loss=True)
MODEL_STAGES = ("old_log_prob", "ref", "update_actor")
"""Stages that run a model over all trajectories; they also read the family's columns."""
SCORING_STAGES = ("reward", "adv")
"""Stages that see the whole batch and run no model."""


def step_graph(family: Family) -> StepGraph:
    """GRPO with a KL loss, as `rl_trainer` builds and checks it."""
    extra = tuple(spec.name for spec in family.extra)

    def extended(stage: Declaration) -> Declaration:
        reads = stage.reads + (extra if stage.name in MODEL_STAGES else ())
        writes = stage.writes + (extra if stage.name == "rollout" else ())
        return dataclasses.replace(stage, reads=reads, writes=writes)

    stages = [extended(stage) for stage in build_graph(ALGORITHM, ACTOR).stages]
    return check_graph(stages, (PROMPT_SCHEMA, TRAINER_SCHEMA, family.extra_schema))


def written(graph: StepGraph) -> tuple[str, ...]:
    """Every column a step writes."""
    return tuple(name for stage in graph.stages for name in stage.writes)
