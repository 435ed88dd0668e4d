"""Estimators that give every token an advantage of its own, from the rewards that follow it in its episode."""

from __future__ import annotations

import numpy as np

from rl_trainer.algorithms.advantages.base import AdvantageInputs, Estimate, whiten
from rl_trainer.algorithms.episodes import Episodes, FloatArray, sum_by


def gae(inputs: AdvantageInputs) -> Estimate:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 11 to 16), then whitened over the batch's tokens.

    delta_t = r_t + gamma V(s_{t+1}) - V(s_t);  A_t = delta_t + gamma lam A_{t+1};  R_t = A_t + V(s_t).
    t + 1 is the next token the policy made, in the session's next trajectory if need be. V after the last is 0.

    Raises:
        ConfigError: no values.
    """
    e = inputs.episodes
    values = inputs.stream(inputs.need("values", "Use algorithm=ppo, which adds a critic."))
    delta = inputs.rewards() + inputs.gamma * e.following(values) - values
    advantages = e.discounted(delta, inputs.gamma * inputs.lam)
    return inputs.to_tokens(whiten(advantages)), inputs.to_tokens(advantages + values)


def reinforce_plus_plus(inputs: AdvantageInputs) -> Estimate:
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): the discounted sum of the rewards from a token on, whitened over the batch's tokens."""
    returns = inputs.episodes.discounted(inputs.rewards(), inputs.gamma)
    return inputs.to_tokens(whiten(returns)), inputs.to_tokens(returns)


def remax(inputs: AdvantageInputs) -> Estimate:
    """ReMax (Li et al. 2023, arXiv:2310.10505): the sum of the rewards from a token on, minus the score of the greedy response to the prompt.

    Raises:
        ConfigError: no scores of greedy responses.
    """
    e = inputs.episodes
    greedy = inputs.need("reward_baselines", "They come from a greedy rollout of every prompt.")[e.final_row]
    returns = e.discounted(inputs.rewards(), 1.0)
    return inputs.to_tokens(returns - e.per_token(greedy)), inputs.to_tokens(returns)


def optimal_token_baseline(inputs: AdvantageInputs) -> Estimate:
    """Optimal token baseline (Li et al. 2026, arXiv:2602.07078): G_t - B_t, where G_t is the sum of the rewards from token t on and
    B_t = sum(G_t W_t) / sum(W_t) over the sessions of the group that are at least t tokens long.

    W_t = sum over j <= t of (1 - 2 pi_j + sum over the vocabulary of pi^2) stands for the squared norm of the gradient so far; with
    importance weights rho each term is multiplied by rho^2. Where only the longest session is left there is no baseline: the advantage is G_t.
    A group of one session has advantage 0.

    Raises:
        ConfigError: no log-probs, or no sums of squared probabilities.
    """
    e, remedy = (
        inputs.episodes,
        "They come from the old_log_prob stage: set algorithm.rollout_correction.bypass_mode=false.",
    )
    energy = 1 - 2 * np.exp(inputs.stream(inputs.need("old_log_probs", remedy)))
    energy += inputs.stream(inputs.need("sum_pi_squared", remedy))
    if inputs.rollout_is_weights is not None:
        energy *= inputs.stream(inputs.rollout_is_weights) ** 2
    returns = e.discounted(inputs.rewards(), 1.0)
    baseline = _weighted_mean_by_place(e, returns, _running(e, energy))
    several = e.per_token(sum_by(e.group, e.counts, e.num_groups)[e.group]) > 1
    return inputs.to_tokens(np.where(several, returns - baseline, 0.0)), inputs.to_tokens(returns)


def _running(e: Episodes, stream: FloatArray) -> FloatArray:
    """[M] running sums within each episode."""
    total = np.concatenate([[0.0], np.cumsum(stream)])
    return total[1:] - np.repeat(total[e.offsets[:-1]], e.lengths)


def _weighted_mean_by_place(e: Episodes, x: FloatArray, weight: FloatArray) -> FloatArray:
    """[M] mean of x over the group's episodes at the same place from their start; 0 where one episode alone is that long."""
    place = np.arange(e.tokens.size) - np.repeat(e.offsets[:-1], e.lengths)
    width = int(e.lengths.max(initial=0))
    cell = np.repeat(e.group, e.lengths) * width + place
    cells = e.num_groups * width
    total, weights, count = (sum_by(cell, w, cells) for w in (x * weight, weight, np.ones_like(x)))
    mean = np.where(count > 1, total / (weights + 1e-8), 0.0)
    return mean[cell]
