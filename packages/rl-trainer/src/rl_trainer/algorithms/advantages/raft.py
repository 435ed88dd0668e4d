"""RAFT: train on the best responses to each prompt alone."""

from __future__ import annotations

import numpy as np

from rl_trainer.algorithms.advantages.estimator import AdvantageInputs, Estimate
from rl_trainer.algorithms.advantages.group_stats import group_stats


def raft(inputs: AdvantageInputs) -> Estimate:
    """RAFT (Dong et al. 2023, arXiv:2304.06767), also called rejection sampling or best of n.

    1 for the prompt's sessions with the highest score, if it is above 0, and 0 for the others. With
    the loss `gpg` that is the cross-entropy of the best responses, and with `vanilla`, which has a
    ratio and clips it, RAFT++ (Xiong et al. 2025, arXiv:2504.11343).
    """
    scores = inputs.session_scores()
    best = group_stats(inputs.episodes, scores).highest
    return inputs.session_advantages(((scores == best) & (scores > 0)).astype(np.float64))
