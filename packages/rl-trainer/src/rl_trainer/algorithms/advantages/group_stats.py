"""Statistics over the sessions of each prompt, for GRPO and its relatives.

A session counts once, however many trajectories it has. A session without a token to train on (all
rejected) is ignored. A group with one session, or whose sessions all have the same score, has
advantage 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rl_trainer.algorithms.advantages.episodes import Episodes
from rl_trainer.algorithms.arrays import BoolArray, FloatArray, IntArray, sum_by

STD_EPSILON = 1e-6
"""Added to a group's standard deviation before dividing by it."""


@dataclass(frozen=True, kw_only=True)
class GroupStats:
    """Statistics of each session's group, all [S]."""

    size: FloatArray
    """Sessions of the group, without empty ones."""
    mean: FloatArray
    highest: FloatArray
    varies: BoolArray
    """True for sessions that are not empty and whose group has different values."""
    deviation: FloatArray
    """Value minus the group's mean; exactly 0 where nothing varies."""
    std: FloatArray
    """Unbiased."""

    def normalized(self, *, by_std: bool) -> FloatArray:
        """[S] deviation, divided by std + STD_EPSILON if `by_std`."""
        return self.deviation / (self.std + STD_EPSILON if by_std else 1.0)


def group_stats(e: Episodes, x: FloatArray) -> GroupStats:
    """Statistics of the sessions' values x [S] within their groups."""
    return stats_by(e.group, e.nonempty, x)


def stats_by(g: IntArray, seen: BoolArray, x: FloatArray) -> GroupStats:
    """Statistics of the values x [S] within the groups g [S], 0..G-1, of those that are `seen`."""
    n = int(g.max(initial=-1)) + 1
    size = sum_by(g, seen, n)
    mean = sum_by(g, np.where(seen, x, 0.0), n) / np.maximum(size, 1)
    highest, lowest = np.full(n, -np.inf), np.full(n, np.inf)
    np.maximum.at(highest, g[seen], x[seen])
    np.minimum.at(lowest, g[seen], x[seen])
    varies = seen & (highest > lowest)[g]
    deviation = np.where(varies, x - mean[g], 0.0)
    variance = sum_by(g, deviation**2, n) / np.maximum(size - 1, 1)
    return GroupStats(
        size=size[g],
        mean=mean[g],
        highest=highest[g],
        varies=varies,
        deviation=deviation,
        std=np.sqrt(variance)[g],
    )
