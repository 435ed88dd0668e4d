"""On-policy distillation: the teacher's log-prob minus the student's, for each sampled token."""

from __future__ import annotations

import numpy as np

from rl_trainer.algorithms.advantages.episodes import Episodes
from rl_trainer.algorithms.advantages.estimator import AdvantageInputs, Estimate
from rl_trainer.algorithms.arrays import FloatArray, sum_by


def opd(inputs: AdvantageInputs) -> Estimate:
    """On-policy distillation (Agarwal et al. 2023, arXiv:2306.13649) in the form of a reward.

    r_t = log pi_teacher - log pi_old of each token that the policy generated: minus the reverse KL
    divergence, estimated at that token, without the divergence of later tokens. The advantage is
    r_t minus the mean r_t of the prompt's other sessions at the same place, which changes the
    variance of the gradient and not its expectation; a token without such a place in another
    session has no baseline. Scores have no part in it. The teacher is the reference policy.
    """
    teacher = inputs.require("ref_log_prob", "The ref stage writes it.")
    student = inputs.require("old_log_probs", "The old_log_prob stage or the rollout engine gives them.")
    rewards = inputs.gather(teacher) - inputs.gather(student)
    return inputs.scatter(rewards - _mean_of_others(inputs.episodes, rewards)), inputs.scatter(rewards)


def _mean_of_others(e: Episodes, rewards: FloatArray) -> FloatArray:
    """[M] mean at the same place of the prompt's other sessions; 0 where there is none."""
    longest = int(e.lengths.max(initial=0))
    place = np.arange(rewards.size) - np.repeat(e.offsets[:-1], e.lengths)
    cell, cells = np.repeat(e.group, e.lengths) * longest + place, e.num_groups * longest
    total = sum_by(cell, rewards, cells)[cell]
    count = sum_by(cell, np.ones_like(rewards), cells)[cell]
    return np.where(count > 1, (total - rewards) / np.maximum(count - 1, 1), 0.0)
