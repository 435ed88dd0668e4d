"""GRPO, Dr. GRPO and Lite PPO: the score of a session relative to the others of its prompt."""

from __future__ import annotations

import dataclasses

import numpy as np

from rl_trainer.algorithms.advantages.estimator import AdvantageInputs, Estimate
from rl_trainer.algorithms.advantages.group_stats import STD_EPSILON, group_stats


def grpo(inputs: AdvantageInputs) -> Estimate:
    """GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    (score - mean) / (std + 1e-6) over the prompt's sessions, with the unbiased std.
    `norm_by_std=False` leaves out the division, which is Dr. GRPO.
    """
    groups = group_stats(inputs.episodes, inputs.session_scores())
    return inputs.session_advantages(groups.normalized(by_std=inputs.norm_by_std))


def dr_grpo(inputs: AdvantageInputs) -> Estimate:
    """Dr. GRPO (Liu et al. 2025, arXiv:2503.20783): score - mean, regardless of `norm_by_std`.

    The other half of the paper, a loss that is not divided by the length of the response, is
    loss_agg_mode=seq-mean-token-sum-norm.
    """
    return grpo(dataclasses.replace(inputs, norm_by_std=False))


def lite_ppo(inputs: AdvantageInputs) -> Estimate:
    """Lite PPO (Liu et al. 2025, arXiv:2508.08221): (score - group mean) / (batch std + 1e-6).

    The std is the unbiased one of the scores of all sessions of the batch, so a prompt that is
    almost always solved does not count more than others, as it does with the std of its group. The
    other half of the paper, a loss that is averaged over tokens, is loss_agg_mode=token-mean.
    """
    scores = inputs.session_scores()
    groups = group_stats(inputs.episodes, scores)
    seen = scores[inputs.episodes.nonempty]
    std = float(np.std(seen, ddof=1)) if seen.size > 1 else 0.0
    return inputs.session_advantages(groups.deviation / (std + STD_EPSILON))
