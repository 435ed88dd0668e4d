"""REINFORCE++, with and without a baseline: rewards whitened over the tokens of the batch."""

from __future__ import annotations

from rl_trainer.algorithms.advantages.estimator import AdvantageInputs, Estimate, whiten
from rl_trainer.algorithms.advantages.group_stats import group_stats


def reinforce_plus_plus(inputs: AdvantageInputs) -> Estimate:
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262).

    The discounted sum of the rewards from a token on, whitened over the batch's tokens.
    """
    returns = inputs.episodes.discounted_sums(inputs.rewards(), inputs.gamma)
    return inputs.scatter(whiten(returns)), inputs.scatter(returns)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Estimate:
    """REINFORCE++ with baseline (same paper): score - group mean, whitened over the batch."""
    e = inputs.episodes
    groups = group_stats(e, inputs.session_scores())
    per_token = inputs.scatter(whiten(e.per_token(groups.deviation)))
    return per_token, per_token
