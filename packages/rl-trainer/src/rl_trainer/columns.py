"""Columns of trajectory rows: those all parts agree on, and those that stages of the trainer hand to each other."""

from __future__ import annotations

from rl_protocol.rl_columns import TRAJECTORY_SCHEMA
from rl_protocol.schema import BatchSchema, ColumnSpec, SameLength

BASELINE_PARTITION = "baseline"
"""Where greedy responses are kept while a step needs their scores."""

_BETWEEN_STAGES = (
    ColumnSpec(
        name="sum_pi_squared",
        kind="ragged",
        dtype="float32",
        writer="old_log_prob",
        meaning="sum over the vocabulary of squared probabilities before the update",
    ),
    ColumnSpec(
        name="reward_components",
        kind="ragged",
        dtype="float32",
        writer="reward",
        meaning="parts of the reward, in the order of algorithm.gdpo_reward_keys",
    ),
    ColumnSpec(
        name="reward_baselines",
        kind="dense",
        dtype="float32",
        writer="baseline",
        meaning="score of the greedy response to the same prompt",
    ),
    ColumnSpec(
        name="loss_mask",
        kind="ragged",
        dtype="bool",
        writer="adv",
        meaning="response_mask without what the rollout correction rejects",
    ),
    ColumnSpec(
        name="rollout_is_weights",
        kind="ragged",
        dtype="float32",
        writer="adv",
        meaning="importance weight of the rollout correction, 0 where masked",
    ),
    ColumnSpec(
        name="chosen_tokens", kind="ragged", dtype="bool", writer="adv", meaning="tokens chosen by clip-cov or kl-cov"
    ),
)

TRAINER_SCHEMA = BatchSchema(
    (*TRAJECTORY_SCHEMA.columns.values(), *_BETWEEN_STAGES),
    laws=(
        *TRAJECTORY_SCHEMA.laws,
        SameLength(("responses", "sum_pi_squared", "loss_mask", "rollout_is_weights", "chosen_tokens")),
        SameLength(("advantages", "returns", "loss_mask", "rollout_is_weights", "chosen_tokens")),
    ),
)
