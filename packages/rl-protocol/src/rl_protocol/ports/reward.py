"""The RewardFunction port."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class RewardFunction(Protocol):
    """Scores one response. Has the signature of verl's `compute_score`."""

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
    ) -> float | Mapping[str, float]:
        """Return a finite score, or a mapping with `score` and further named numbers such as
        `acc`."""
        ...
