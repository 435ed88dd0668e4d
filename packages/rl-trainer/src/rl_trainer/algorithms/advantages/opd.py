"""On-policy distillation: the teacher's log-prob minus the student's, for each sampled token."""

from __future__ import annotations

from rl_trainer.algorithms.advantages.estimator import AdvantageInputs, Estimate


def opd(inputs: AdvantageInputs) -> Estimate:
    """On-policy distillation (Agarwal et al. 2023, arXiv:2306.13649) in the form of a reward.

    A_t = log pi_teacher - log pi_old of each token that the policy generated: minus the reverse KL
    divergence, estimated at that token, without the divergence of later tokens. Scores have no part
    in it. The teacher is the reference policy.
    """
    teacher = inputs.require("ref_log_prob", "The ref stage writes it.")
    student = inputs.require("old_log_probs", "The old_log_prob stage or the rollout engine gives them.")
    advantages = inputs.scatter(inputs.gather(teacher) - inputs.gather(student))
    return advantages, advantages
