"""GRPOGroupNSampler of 0.1.11: whole groups of consecutive rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_protocol.errors import BatchError, ConfigError
from rl_transferqueue.compat.sampler.base import BaseSampler, Sampled


class GRPOGroupNSampler(BaseSampler):
    """Chooses groups of `n_samples_per_prompt` consecutive global indexes.

    Raises:
        ConfigError: the group size is below 1.
    """

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        super().__init__()
        if n_samples_per_prompt < 1:
            raise ConfigError(f"n_samples_per_prompt must be positive, got {n_samples_per_prompt}.")
        self.n_samples_per_prompt = n_samples_per_prompt

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Sampled:
        """Choose whole groups.

        Raises:
            BatchError: `batch_size` is not a multiple of the group size.
        """
        rank, index = kwargs.get("dp_rank"), kwargs.get("batch_index")
        if rank is not None and index in self._remembered(partition_id, task_name, rank):
            rows, consumed = self._remembered(partition_id, task_name, rank)[index]
            return list(rows), list(consumed)
        rows = self.whole_groups(ready_indexes, batch_size)
        if rank is not None and rows:
            self._remember(partition_id, task_name, rank, index, (rows, list(rows)))
        return list(rows), list(rows)

    def whole_groups(self, ready_indexes: Sequence[int], count: int) -> list[int]:
        """`count` rows of whole groups, in order; [] if there are fewer.

        Raises:
            BatchError: `count` is not a multiple of the group size.
        """
        size = self.n_samples_per_prompt
        if count % size:
            raise BatchError(f"batch_size ({count}) must be a multiple of n_samples_per_prompt ({size}).")
        rows, chosen, at = sorted(ready_indexes), list[int](), 0
        while at + size <= len(rows) and len(chosen) < count:
            if rows[at + size - 1] - rows[at] == size - 1:
                chosen += rows[at : at + size]
                at += size
            else:
                at += 1
        return chosen if len(chosen) == count else []
