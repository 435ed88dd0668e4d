"""The default sampler."""

from __future__ import annotations

from typing import Any

from rl_transferqueue.compat.sampler.base import BaseSampler, Sampled


class SequentialSampler(BaseSampler):
    """The first rows, or all of them if there are fewer; `get_meta` asks only once there are enough."""

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Sampled:
        """See BaseSampler.sample."""
        rows = ready_indexes[:batch_size]
        return rows, list(rows)
