"""SequentialSampler of 0.1.11, the default."""

from __future__ import annotations

from typing import Any

from rl_transferqueue.compat.sampler.base import BaseSampler, Sampled


class SequentialSampler(BaseSampler):
    """Chooses the first rows, or all of them if there are fewer."""

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Sampled:

        rows = ready_indexes[:batch_size]
        return rows, list(rows)
