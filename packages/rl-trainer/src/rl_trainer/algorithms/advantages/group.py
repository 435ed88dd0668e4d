"""Estimators that compare the sessions of one prompt: every token of a session gets the session's advantage, which is also its return.

A session counts once, however many trajectories it has; one without a token to learn from (rejected) is not seen at all. A group that has
only one session, or whose sessions all score the same, has advantage 0: there is nothing to compare with.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from rl_protocol import ConfigError
from rl_trainer.algorithms.advantages.base import AdvantageInputs, Estimate, whiten
from rl_trainer.algorithms.episodes import BoolArray, Episodes, FloatArray, sum_by

STD_EPSILON = 1e-6
"""Added to a group's standard deviation before it divides."""


@dataclass(frozen=True, kw_only=True)
class _Groups:
    """Statistics of each session's group, all [S]."""

    size: FloatArray
    """Sessions that count."""
    highest: FloatArray
    varies: BoolArray
    """True where the session counts and its group's values differ."""
    deviation: FloatArray
    """Value minus the group's mean; exactly 0 where nothing varies."""
    std: FloatArray
    """Unbiased."""


def _groups(e: Episodes, x: FloatArray) -> _Groups:
    g, n, seen = e.group, e.num_groups, e.counts
    size = sum_by(g, seen, n)
    mean = sum_by(g, np.where(seen, x, 0.0), n) / np.maximum(size, 1)
    highest, lowest = np.full(n, -np.inf), np.full(n, np.inf)
    np.maximum.at(highest, g[seen], x[seen])
    np.minimum.at(lowest, g[seen], x[seen])
    varies = seen & (highest > lowest)[g]
    deviation = np.where(varies, x - mean[g], 0.0)
    variance = sum_by(g, deviation**2, n) / np.maximum(size - 1, 1)
    return _Groups(size=size[g], highest=highest[g], varies=varies, deviation=deviation, std=np.sqrt(variance)[g])


def _on_tokens(inputs: AdvantageInputs, per_session: FloatArray) -> Estimate:
    per_token = inputs.to_tokens(inputs.episodes.per_token(per_session))
    return per_token, per_token


def grpo(inputs: AdvantageInputs) -> Estimate:
    """GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2): (score - mean) / (std + 1e-6) over the prompt's sessions, std unbiased.

    `norm_by_std=False` leaves the division out, which is Dr.GRPO.
    """
    groups = _groups(inputs.episodes, inputs.session_scores())
    scale = groups.std + STD_EPSILON if inputs.norm_by_std else 1.0
    return _on_tokens(inputs, groups.deviation / scale)


def dr_grpo(inputs: AdvantageInputs) -> Estimate:
    """Dr.GRPO (Liu et al. 2025, arXiv:2503.20783): score - mean, whatever `norm_by_std` says.

    The paper's other half, a loss without the response's own length in the denominator, is loss_agg_mode=seq-mean-token-sum-norm.
    """
    return grpo(dataclasses.replace(inputs, norm_by_std=False))


def grpo_passk(inputs: AdvantageInputs) -> Estimate:
    """Pass@k (Tang et al. 2025, arXiv:2503.19595): only the best session of a group is credited, with its lead over the second best,
    divided by the group's std + 1e-6 if `norm_by_std`. Two that are equally good lead by 0.
    """
    e, x = inputs.episodes, inputs.session_scores()
    groups = _groups(e, x)
    best = e.counts & (x == groups.highest)
    others, second = e.counts & ~best, np.full(e.num_groups, -np.inf)
    np.maximum.at(second, e.group[others], x[others])
    alone = best & (sum_by(e.group, best, e.num_groups)[e.group] == 1) & groups.varies
    lead = np.where(alone, x - np.where(alone, second[e.group], 0.0), 0.0)
    return _on_tokens(inputs, lead / (groups.std + STD_EPSILON) if inputs.norm_by_std else lead)


def rloo(inputs: AdvantageInputs) -> Estimate:
    """RLOO (Ahmadian et al. 2024, arXiv:2402.14740): score minus the mean of the group's n - 1 other sessions, n / (n - 1) * (score - mean)."""
    groups = _groups(inputs.episodes, inputs.session_scores())
    return _on_tokens(inputs, groups.deviation * groups.size / np.maximum(groups.size - 1, 1))


def opo(inputs: AdvantageInputs) -> Estimate:
    """OPO (Hao et al. 2025, arXiv:2505.23585): score minus the mean of the group's scores weighted by length, sum(l r) / sum(l), where l is
    the number of tokens the policy made in the session."""
    e, x = inputs.episodes, inputs.session_scores()
    length = e.lengths.astype(np.float64)
    weighted, total = (sum_by(e.group, w, e.num_groups) for w in (length * x, length))
    baseline = (weighted / np.maximum(total, 1))[e.group]
    return _on_tokens(inputs, np.where(_groups(e, x).varies, x - baseline, 0.0))


def gpg(inputs: AdvantageInputs) -> Estimate:
    """GPG (Chu et al. 2025, arXiv:2504.02546): alpha * (score - mean), where alpha = B / (B - M) makes up for the M of B sessions that teach
    nothing because their group's scores are all equal."""
    e = inputs.episodes
    groups = _groups(e, inputs.session_scores())
    teaching = int(groups.varies.sum())
    return _on_tokens(inputs, groups.deviation * (int(e.counts.sum()) / max(teaching, 1)))


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Estimate:
    """REINFORCE++ with baseline (Hu et al. 2025, arXiv:2501.03262): score - mean of the group, then whitened over the batch's tokens."""
    e = inputs.episodes
    groups = _groups(e, inputs.session_scores())
    per_token = inputs.to_tokens(whiten(e.per_token(groups.deviation)))
    return per_token, per_token


def gdpo(inputs: AdvantageInputs) -> Estimate:
    """GDPO (Liu et al. 2026, arXiv:2601.05242): each part of the reward is normalised within the group as in `grpo`, so that none drowns the
    others; their weighted sum is whitened over the batch's tokens. Token rewards are not looked at.

    Raises:
        ConfigError: no parts.
    """
    e = inputs.episodes
    parts = inputs.need("reward_components", "Name them in algorithm.gdpo_reward_keys.")[e.final_row]
    weights = np.ones(parts.shape[1]) if inputs.component_weights is None else inputs.component_weights
    if weights.shape != parts.shape[1:]:
        raise ConfigError(
            f"algorithm.gdpo_reward_weights must have one weight for each of the {parts.shape[1]} keys; got {weights.size}."
        )
    total = np.zeros(e.lengths.size)
    for part, weight in zip(parts.T, weights, strict=True):
        groups = _groups(e, part)
        total += weight * groups.deviation / (groups.std + STD_EPSILON if inputs.norm_by_std else 1.0)
    per_token = inputs.to_tokens(whiten(e.per_token(total)))
    return per_token, per_token
