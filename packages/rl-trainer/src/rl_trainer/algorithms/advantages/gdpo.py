"""GDPO: each component of the reward is normalized on its own."""

from __future__ import annotations

import numpy as np

from rl_protocol import ConfigError
from rl_trainer.algorithms.advantages.estimator import AdvantageInputs, Estimate, whiten
from rl_trainer.algorithms.advantages.group_stats import STD_EPSILON, group_stats


def gdpo(inputs: AdvantageInputs) -> Estimate:
    """GDPO (Liu et al. 2026, arXiv:2601.05242).

    Each component of the reward is normalized within the group as in `grpo`, so that none dominates
    the others; their weighted sum is whitened over the batch's tokens. Token rewards are ignored.

    Raises:
        ConfigError: there are no components, or not one weight for each.
    """
    e = inputs.episodes
    components = inputs.require("reward_components", "Name them in AlgorithmConfig.gdpo_reward_keys.")[e.final_row]
    weights = np.ones(components.shape[1]) if inputs.component_weights is None else inputs.component_weights
    if weights.shape != components.shape[1:]:
        raise ConfigError(
            f"AlgorithmConfig.gdpo_reward_weights must have one weight for each of the {components.shape[1]} keys; got {weights.size}."
        )
    total = np.zeros(e.lengths.size)
    for component, weight in zip(components.T, weights, strict=True):
        groups = group_stats(e, component)
        total += weight * groups.deviation / (groups.std + STD_EPSILON if inputs.norm_by_std else 1.0)
    per_token = inputs.scatter(whiten(e.per_token(total)))
    return per_token, per_token
