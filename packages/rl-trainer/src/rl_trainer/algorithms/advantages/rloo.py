"""RLOO: leave-one-out baseline."""

from __future__ import annotations

import numpy as np

from rl_trainer.algorithms.advantages.estimator import AdvantageInputs, Estimate
from rl_trainer.algorithms.advantages.group_stats import group_stats


def rloo(inputs: AdvantageInputs) -> Estimate:
    """RLOO (Ahmadian et al. 2024, arXiv:2402.14740).

    Score minus the mean score of the group's n - 1 other sessions, which is
    n / (n - 1) * (score - mean).
    """
    groups = group_stats(inputs.episodes, inputs.session_scores())
    return inputs.session_advantages(groups.deviation * groups.size / np.maximum(groups.size - 1, 1))
