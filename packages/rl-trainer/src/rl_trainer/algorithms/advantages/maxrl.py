"""MaxRL: the score relative to the prompt's mean, so that hard prompts count more."""

from __future__ import annotations

import numpy as np

from rl_protocol import BatchError
from rl_trainer.algorithms.advantages.estimator import AdvantageInputs, Estimate
from rl_trainer.algorithms.advantages.group_stats import group_stats


def maxrl(inputs: AdvantageInputs) -> Estimate:
    """MaxRL (Tajwar et al. 2026, arXiv:2602.02710, algorithm 1): (score - mean) / mean.

    The mean is that of the prompt's sessions. With scores of 0 and 1 the gradient approximates that
    of the log-likelihood of a right answer, to the order of the number of sessions; without a right
    answer it is 0.

    Raises:
        BatchError: a session's reward is negative, for which the mean is no probability.
    """
    scores = inputs.session_scores()
    if scores.size and float(scores.min()) < 0:
        raise BatchError(
            f"AlgorithmConfig.adv_estimator=maxrl needs rewards of at least 0, such as 0 and 1; got {float(scores.min()):g}. Change "
            "the reward function, or set another estimator."
        )
    groups = group_stats(inputs.episodes, scores)
    return inputs.session_advantages(groups.deviation / np.where(groups.varies, groups.mean, 1.0))
