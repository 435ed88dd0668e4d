"""The samplers of TransferQueue 0.1.11: classes that see row numbers (`ready_indexes`) and say which to hand out and which to mark consumed.

They run in the process that asks, not in the controller; the plane makes sure that no row goes to two. `rl_transferqueue.samplers` is the
native way: groups by tag, not by consecutive numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from rl_protocol.errors import BatchError, ConfigError
from rl_transferqueue.samplers import deal

Sampled = tuple[list[int], list[int]]
"""Rows to hand out, rows to mark as consumed."""


class PartitionView(Protocol):
    """What a sampler may ask about the partition."""

    def get_custom_meta(self, global_indices: list[int]) -> dict[int, dict[str, Any]]:
        """Tags of the rows."""
        ...


class BaseSampler(ABC):
    """Chooses rows. `_states[partition][task][dp_rank][batch_index]` remembers what was given to a rank, so that it gets the same again."""

    def __init__(self) -> None:
        self._states: dict[Any, Any] = {}

    @abstractmethod
    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Sampled:
        """Choose among the rows that are ready and not consumed; ([], []) when there is not enough."""

    def __call__(self, *args: Any, **kwargs: Any) -> Sampled:
        return self.sample(*args, **kwargs)

    def settled_ranks(self, dp_rank: int) -> Sequence[int]:
        """Ranks whose rows are decided when `dp_rank` asks. Their answers are kept in the plane, for whichever process asks next."""
        return (dp_rank,)

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: dict[str, Any] | None = None
    ) -> bool:
        """Whether this rank was answered before for this `batch_index`."""
        config = sampling_config or {}
        rank, index = config.get("dp_rank"), config.get("batch_index")
        return rank is not None and index in self._remembered(partition_id, task_name, rank)

    def clear_cache(self, partition_id: str) -> None:
        """Forget all answers of a partition."""
        self._states.pop(partition_id, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """The state, to be given to `load_checkpoint`."""
        return {"_states": self._states}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        self._states = state["_states"]

    def _remembered(self, partition_id: str, task_name: str, dp_rank: int) -> dict[Any, Sampled]:
        return self._states.get(partition_id, {}).get(task_name, {}).get(dp_rank, {})

    def _remember(self, partition_id: str, task_name: str, dp_rank: int, batch_index: Any, rows: Sequence[int]) -> None:
        ranks = self._states.setdefault(partition_id, {}).setdefault(task_name, {})
        ranks.setdefault(dp_rank, {})[batch_index] = (list(rows), list(rows))


class SequentialSampler(BaseSampler):
    """The first rows."""

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Sampled:
        """See BaseSampler.sample."""
        rows = ready_indexes[:batch_size] if len(ready_indexes) >= batch_size else []
        return rows, list(rows)


class RankAwareSampler(BaseSampler):
    """The first rows, the same for all processes of one `dp_rank` and `batch_index`."""

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
        """See BaseSampler.sample.

        Raises:
            BatchError: a negative rank.
        """
        if dp_rank < 0:
            raise BatchError(f"dp_rank must be at least 0; got {dp_rank}.")
        known = self._remembered(partition_id, task_name, dp_rank)
        if batch_index not in known:
            if len(ready_indexes) < batch_size:
                return [], []
            self._remember(partition_id, task_name, dp_rank, batch_index, ready_indexes[:batch_size])
        rows, consumed = self._remembered(partition_id, task_name, dp_rank)[batch_index]
        return list(rows), list(consumed)


class GRPOGroupNSampler(BaseSampler):
    """Whole groups: runs of `n_samples_per_prompt` consecutive row numbers.

    Raises:
        ConfigError: a group size below 1.
    """

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        super().__init__()
        if n_samples_per_prompt < 1:
            raise ConfigError(f"n_samples_per_prompt must be at least 1; got {n_samples_per_prompt}.")
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
        """See BaseSampler.sample.

        Raises:
            BatchError: `batch_size` is not a multiple of the group size.
        """
        rank, index = kwargs.get("dp_rank"), kwargs.get("batch_index")
        if rank is not None and index in self._remembered(partition_id, task_name, rank):
            rows, consumed = self._remembered(partition_id, task_name, rank)[index]
            return list(rows), list(consumed)
        rows = self._whole_groups(ready_indexes, batch_size)
        if rank is not None and rows:
            self._remember(partition_id, task_name, rank, index, rows)
        return rows, list(rows)

    def _whole_groups(self, ready_indexes: Sequence[int], count: int) -> list[int]:
        size = self.n_samples_per_prompt
        if count % size:
            raise BatchError(f"batch_size {count} must be a multiple of n_samples_per_prompt {size}.")
        rows, chosen, at = sorted(ready_indexes), list[int](), 0
        while at + size <= len(rows) and len(chosen) < count:
            if rows[at + size - 1] - rows[at] == size - 1:
                chosen += rows[at : at + size]
                at += size
            else:
                at += 1
        return chosen if len(chosen) == count else []


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """Whole groups, as many for each of `dp_size` ranks and of nearly equal length: the tag `total_lengths` of the rows, 1 where it is absent.

    `batch_size` is that of one rank. Ranks differ by at most the difference between the longest and the shortest group.

    Raises:
        ConfigError: a size below 1.
    """

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1) -> None:
        super().__init__(n_samples_per_prompt)
        if dp_size < 1:
            raise ConfigError(f"dp_size must be at least 1; got {dp_size}.")
        self.dp_size = dp_size

    def settled_ranks(self, dp_rank: int) -> Sequence[int]:
        """All of them."""
        return range(self.dp_size)

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Sampled:
        """See BaseSampler.sample.

        Raises:
            BatchError: `batch_size` is not a multiple of the group size, or the rank is not below `dp_size`.
        """
        rank, index = kwargs.get("dp_rank", 0), kwargs.get("batch_index", 0)
        if not 0 <= rank < self.dp_size:
            raise BatchError(f"dp_rank must be in 0..{self.dp_size - 1}; got {rank}.")
        if index not in self._remembered(partition_id, task_name, rank):
            self._whole_groups((), batch_size)
            rows = self._whole_groups(ready_indexes, batch_size * self.dp_size)
            if not rows:
                return [], []
            view: PartitionView | None = kwargs.get("partition")
            tags = view.get_custom_meta(rows) if view is not None else {}
            size = self.n_samples_per_prompt
            groups = [rows[at : at + size] for at in range(0, len(rows), size)]
            lengths = [sum(int(tags.get(row, {}).get("total_lengths", 1)) for row in group) for group in groups]
            for hand, items in enumerate(deal(lengths, self.dp_size)):
                mine = [row for item in items for row in groups[item]]
                self._remember(partition_id, task_name, hand, index, mine)
        rows, consumed = self._remembered(partition_id, task_name, rank)[index]
        return list(rows), list(consumed)
