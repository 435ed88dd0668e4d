"""RankAwareSampler of 0.1.11: the same rows for all processes of a data-parallel rank."""

from __future__ import annotations

from typing import Any

from rl_protocol.errors import BatchError
from rl_transferqueue.compat.sampler.base import BaseSampler, Sampled


class RankAwareSampler(BaseSampler):
    """Chooses the first rows, the same for all processes of a `dp_rank` and `batch_index`."""

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        dp_rank: int = 0,
        batch_index: int = 0,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Sampled:
        """Choose the first rows, or those that this rank already has.

        Raises:
            BatchError: a negative rank.
        """
        if dp_rank < 0:
            raise BatchError(f"dp_rank {dp_rank} must be greater than or equal to 0.")
        if batch_index not in self._remembered(partition_id, task_name, dp_rank):
            if len(ready_indexes) < batch_size:
                return [], []
            self._remember(partition_id, task_name, dp_rank, batch_index, ready_indexes[:batch_size])
        rows: list[int] = self._remembered(partition_id, task_name, dp_rank)[batch_index]
        return list(rows), list(rows)
