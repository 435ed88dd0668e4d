"""GPG: group policy gradient, corrected for prompts without signal."""

from __future__ import annotations

from rl_trainer.algorithms.advantages.estimator import AdvantageInputs, Estimate
from rl_trainer.algorithms.advantages.group_stats import group_stats


def gpg(inputs: AdvantageInputs) -> Estimate:
    """GPG (Chu et al. 2025, arXiv:2504.02546): alpha * (score - mean).

    alpha = B / (B - M) corrects for the M of B sessions without signal, because the scores of their
    group are all equal.
    """
    e = inputs.episodes
    groups = group_stats(e, inputs.session_scores())
    informative = int(groups.varies.sum())
    return inputs.session_advantages(groups.deviation * (int(e.nonempty.sum()) / max(informative, 1)))
