"""OPO: optimal reward baseline, the length-weighted mean score."""

from __future__ import annotations

import numpy as np

from rl_trainer.algorithms.advantages.estimator import AdvantageInputs, Estimate
from rl_trainer.algorithms.advantages.group_stats import group_stats
from rl_trainer.algorithms.arrays import sum_by


def opo(inputs: AdvantageInputs) -> Estimate:
    """OPO (Hao et al. 2025, arXiv:2505.23585).

    Score minus the length-weighted mean of the group's scores, sum(l r) / sum(l), where l is the
    number of tokens that the policy generated in the session.
    """
    e, x = inputs.episodes, inputs.session_scores()
    length = e.lengths.astype(np.float64)
    weighted, total = (sum_by(e.group, w, e.num_groups) for w in (length * x, length))
    baseline = (weighted / np.maximum(total, 1))[e.group]
    return inputs.session_advantages(np.where(group_stats(e, x).varies, x - baseline, 0.0))
