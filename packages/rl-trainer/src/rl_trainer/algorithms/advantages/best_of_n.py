"""Pass@k training (`grpo_passk`) and RAFT: only the best sessions of a prompt are rewarded."""

from __future__ import annotations

import numpy as np

from rl_trainer.algorithms.advantages.estimator import AdvantageInputs, Estimate
from rl_trainer.algorithms.advantages.group_stats import STD_EPSILON, group_stats
from rl_trainer.algorithms.arrays import sum_by


def grpo_passk(inputs: AdvantageInputs) -> Estimate:
    """Pass@k (Tang et al. 2025, arXiv:2503.19595).

    The best session of a group gets its lead over the second best, divided by the group's std +
    1e-6 if `norm_by_std`; all others get 0. If two sessions share the best score, the lead is 0.
    """
    e, x = inputs.episodes, inputs.session_scores()
    groups = group_stats(e, x)
    best = e.nonempty & (x == groups.highest)
    others, second = e.nonempty & ~best, np.full(e.num_groups, -np.inf)
    np.maximum.at(second, e.group[others], x[others])
    alone = best & (sum_by(e.group, best, e.num_groups)[e.group] == 1) & groups.varies
    lead = np.where(alone, x - np.where(alone, second[e.group], 0.0), 0.0)
    return inputs.session_advantages(lead / (groups.std + STD_EPSILON) if inputs.norm_by_std else lead)


def raft(inputs: AdvantageInputs) -> Estimate:
    """RAFT (Dong et al. 2023, arXiv:2304.06767), also called rejection sampling or best of n.

    1 for the prompt's sessions with the highest score, if it is above 0, and 0 for the others. With
    the loss `gpg` that is the cross-entropy of the best responses, and with `vanilla`, which has a
    ratio and clips it, RAFT++ (Xiong et al. 2025, arXiv:2504.11343).
    """
    scores = inputs.session_scores()
    best = group_stats(inputs.episodes, scores).highest
    return inputs.session_advantages(((scores == best) & (scores > 0)).astype(np.float64))
