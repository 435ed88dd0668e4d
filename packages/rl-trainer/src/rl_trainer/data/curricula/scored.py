"""Curricula that see scores: the weight with which each prompt is drawn next."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from rl_trainer.data.curricula.prompt_scores import FloatArray, PromptScores

STALE_SHARE = 0.1
"""Share of the prompts that are drawn for their age alone: old scores are of another policy."""


@runtime_checkable
class ScoredCurriculum(Protocol):
    """Decides from the scores so far how often each row is drawn."""

    def weights(self, scores: PromptScores) -> FloatArray:
        """[rows] weights, at least 0 and one of them above; rows are drawn in proportion to them.

        The result must depend only on the scores, because a resumed run asks again.
        """
        ...


class TargetScore:
    """Difficulty-targeted sampling: most often prompts whose mean score is near the target.

    The weight of a prompt is exp(-((expected - target) / width)^2), where a prompt that was not
    trained is expected to score as its data source does. This is the idea of AdaRFT (Shi et al.
    2025, arXiv 2504.05520) with difficulties that the run itself measures.

    Args:
        width: distance from the target at which the weight is 1/e, in units of the score.
    """

    def __init__(self, width: float = 0.25) -> None:
        self._width = width

    def weights(self, scores: PromptScores) -> FloatArray:
        squared = np.nan_to_num((scores.expected - scores.target) / self._width, nan=0.0) ** 2
        return with_stale(np.exp(squared.min() - squared), scores)  # the largest is 1, however far the scores are


class PrioritizedReplay:
    """Prioritised replay: most often prompts whose responses had the most different scores.

    The priority of a prompt is the standard deviation of the scores of its newest responses, to
    which its gradient under group-relative advantages is proportional. The weight is (priority +
    epsilon)^alpha, and a prompt that was not trained has the largest priority of all (Schaul et al.
    2016, arXiv 1511.05952). A share is drawn by age (Jiang et al. 2021, arXiv 2010.03934).

    Args:
        alpha: 0 draws uniformly, 1 in proportion to the priorities.
        epsilon: added to priorities, in units of the score.
    """

    def __init__(self, alpha: float = 0.6, epsilon: float = 0.01) -> None:
        self._alpha = alpha
        self._epsilon = epsilon

    def weights(self, scores: PromptScores) -> FloatArray:
        priority = np.sqrt(scores.variance)
        priority = np.where(scores.seen, priority, np.max(priority, where=scores.seen, initial=0.0))
        return with_stale((priority + self._epsilon) ** self._alpha, scores)


def with_stale(weights: FloatArray, scores: PromptScores) -> FloatArray:
    """[rows] probabilities: STALE_SHARE of them in proportion to age, the others to `weights`."""
    chosen, age = weights / weights.sum(), scores.age
    return (1 - STALE_SHARE) * chosen + STALE_SHARE * age / age.sum() if age.any() else chosen
