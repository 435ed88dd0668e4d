"""GRPO and Dr. GRPO: the score of a session relative to the other sessions of its prompt."""

from __future__ import annotations

import dataclasses

from rl_trainer.algorithms.advantages.estimator import AdvantageInputs, Estimate
from rl_trainer.algorithms.advantages.group_stats import group_stats


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
