"""Optimal token baseline: a variance-reducing baseline per token position."""

from __future__ import annotations

import numpy as np

from rl_trainer.algorithms.advantages.episodes import Episodes
from rl_trainer.algorithms.advantages.estimator import AdvantageInputs, Estimate
from rl_trainer.algorithms.arrays import FloatArray, sum_by


def optimal_token_baseline(inputs: AdvantageInputs) -> Estimate:
    """Optimal token baseline (Li et al. 2026, arXiv:2602.07078): G_t - B_t.

    G_t is the sum of the rewards from token t on, and B_t = sum(G_t W_t) / sum(W_t) over the
    sessions of the group that have at least t tokens. W_t approximates the squared norm of the
    gradient so far: the sum over j <= t of (1 - 2 pi_j + sum over the vocabulary of pi^2). With
    importance weights rho, each term is multiplied by rho^2. Past the second-longest session there
    is no baseline, so the advantage is G_t. A group of one session has advantage 0.

    Raises:
        ConfigError: there are no log-probs, or no sums of squared probabilities.
    """
    e, remedy = (
        inputs.episodes,
        "They come from the old_log_prob stage: set AlgorithmConfig.old_log_prob=recompute.",
    )
    energy = 1 - 2 * np.exp(inputs.gather(inputs.require("old_log_probs", remedy)))
    energy += inputs.gather(inputs.require("sum_pi_squared", remedy))
    if inputs.rollout_is_weights is not None:
        energy *= inputs.gather(inputs.rollout_is_weights) ** 2
    returns = e.discounted_sums(inputs.rewards(), 1.0)
    baseline = _weighted_mean_by_place(e, returns, _running_sums(e, energy))
    several = e.per_token(sum_by(e.group, e.nonempty, e.num_groups)[e.group]) > 1
    return inputs.scatter(np.where(several, returns - baseline, 0.0)), inputs.scatter(returns)


def _running_sums(e: Episodes, stream: FloatArray) -> FloatArray:
    """[M] running sums within each episode."""
    total = np.concatenate([[0.0], np.cumsum(stream)])
    return total[1:] - np.repeat(total[e.offsets[:-1]], e.lengths)


def _weighted_mean_by_place(e: Episodes, x: FloatArray, weight: FloatArray) -> FloatArray:
    """[M] mean of x over the group at the same place; 0 where only one episode is that long."""
    place = np.arange(e.tokens.size) - np.repeat(e.offsets[:-1], e.lengths)
    width = int(e.lengths.max(initial=0))
    cell = np.repeat(e.group, e.lengths) * width + place
    cells = e.num_groups * width
    total, weights, count = (sum_by(cell, w, cells) for w in (x * weight, weight, np.ones_like(x)))
    mean = np.where(count > 1, total / (weights + 1e-8), 0.0)
    return mean[cell]
