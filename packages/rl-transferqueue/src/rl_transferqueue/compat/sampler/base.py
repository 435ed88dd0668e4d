"""BaseSampler of TransferQueue 0.1.11."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

Sampled = tuple[list[int], list[int]]
"""Global indexes to hand out, and those to mark consumed."""


class PartitionView(Protocol):
    """The partition, as a sampler sees it."""

    def get_custom_meta(self, global_indices: list[int]) -> dict[int, dict[str, Any]]:
        """Tags of the rows."""
        ...


class BaseSampler(ABC):
    """Chooses rows.

    `_states[partition][task][dp_rank][batch_index]` keeps a rank's rows for repeated requests.
    """

    def __init__(self) -> None:
        self._states: dict[Any, Any] = {}

    @abstractmethod
    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Sampled:
        """Choose among the rows that are ready and not consumed; ([], []) if there are too few."""

    def __call__(self, *args: Any, **kwargs: Any) -> Sampled:
        return self.sample(*args, **kwargs)

    def settled_ranks(self, dp_rank: int) -> Sequence[int]:
        """Ranks whose rows are decided when `dp_rank` asks; the plane keeps them all."""
        return (dp_rank,)

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: dict[str, Any] | None = None
    ) -> bool:
        """Whether this rank already has rows for this `batch_index`."""
        config = sampling_config or {}
        rank, index = config.get("dp_rank"), config.get("batch_index")
        return rank is not None and index in self._remembered(partition_id, task_name, rank)

    def clear_cache(self, partition_id: str) -> None:
        """Forget all rows given out of a partition."""
        self._states.pop(partition_id, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """The state, for `load_checkpoint`."""
        return {"_states": self._states}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self._states = state["_states"]

    def _remembered(self, partition_id: str, task_name: str, dp_rank: int) -> dict[Any, Any]:
        return self._states.get(partition_id, {}).get(task_name, {}).get(dp_rank, {})

    def _remember(self, partition_id: str, task_name: str, dp_rank: int, batch_index: Any, answer: Any) -> None:
        ranks = self._states.setdefault(partition_id, {}).setdefault(task_name, {})
        ranks.setdefault(dp_rank, {})[batch_index] = answer
