"""SeqlenBalancedSampler of 0.1.11: whole groups, with about equal tokens for each rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, TypeAlias

from rl_protocol.errors import ConfigError
from rl_transferqueue.compat.errors import UnevenPartsError
from rl_transferqueue.compat.sampler.base import PartitionView, Sampled
from rl_transferqueue.compat.sampler.grpo_group_n_sampler import GRPOGroupNSampler


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """Gives each of `dp_size` ranks the same number of whole groups, of nearly equal total length.

    A row's length is its tag `total_lengths`, or 1. `batch_size` is the size for one rank. The
    first rank that asks for a `batch_index` decides for all ranks. Groups are partitioned with the
    differencing method of Karmarkar and Karp. A rank >= `dp_size` gets no rows.

    Raises:
        ConfigError: a size is below 1.
    """

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1) -> None:
        super().__init__(n_samples_per_prompt)
        if dp_size < 1:
            raise ConfigError(f"dp_size must be positive, got {dp_size}.")
        self.dp_size = dp_size
        self._balanced_cache: dict[tuple[str, str, Any], list[list[int]]] = {}
        """Rows of each rank, by (partition, task, batch_index)."""

    def settled_ranks(self, dp_rank: int) -> Sequence[int]:
        """All ranks."""
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
        """Choose whole groups for `dp_rank` and `batch_index`, with the tags of `partition`.

        Raises:
            BatchError: `batch_size` is not a multiple of the group size.
        """
        rank, index = kwargs.get("dp_rank", 0), kwargs.get("batch_index", 0)
        turn = (partition_id, task_name, index)
        if turn not in self._balanced_cache:
            rows = self.whole_groups(ready_indexes, batch_size * self.dp_size)
            if not rows:
                return [], []
            shares = self._shares(rows, kwargs.get("partition"))
            self._balanced_cache[turn] = shares
            for each, share in enumerate(shares):
                self._remember(partition_id, task_name, each, index, (share, list(share)))
        shares = self._balanced_cache[turn]
        mine = shares[rank] if 0 <= rank < len(shares) else []
        return list(mine), list(mine)

    def clear_cache(self, partition_id: str) -> None:
        super().clear_cache(partition_id)
        self._balanced_cache = {
            turn: shares for turn, shares in self._balanced_cache.items() if turn[0] != partition_id
        }

    def save_checkpoint(self) -> dict[str, Any]:

        return super().save_checkpoint() | {"_balanced_cache": self._balanced_cache}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        super().load_checkpoint(state)
        self._balanced_cache = state["_balanced_cache"]

    def _shares(self, rows: list[int], view: PartitionView | None) -> list[list[int]]:
        """Rows of each rank; consecutive rows if the lengths are unknown."""
        if view is None:
            each = len(rows) // self.dp_size
            return [rows[at : at + each] for at in range(0, len(rows), each)]
        size, tags = self.n_samples_per_prompt, view.get_custom_meta(rows)
        groups = [rows[at : at + size] for at in range(0, len(rows), size)]
        lengths = [sum(int(tags.get(row, {}).get("total_lengths", 1)) for row in group) for group in groups]
        parts = get_seqlen_balanced_partitions(lengths, self.dp_size, equal_size=True)
        return [[row for item in part for row in groups[item]] for part in parts]


_Bin: TypeAlias = tuple[int, int, tuple[tuple[int, int], ...]]
"""Sum of the lengths, number of items, and (item, length) of each."""


class _Bins:
    """A partial solution: k bins, fullest first."""

    def __init__(self, bins: Sequence[_Bin]) -> None:
        self.bins = sorted(bins, reverse=True)

    @property
    def _rank(self) -> tuple[int, _Bin]:
        return (self.bins[0][0] - self.bins[-1][0], self.bins[0])

    def __lt__(self, other: _Bins) -> bool:
        """The widest spread leaves the heap first."""
        return self._rank > other._rank

    def merged(self, other: _Bins) -> _Bins:
        """The fullest bins with the emptiest of the other."""
        pairs = zip(self.bins, reversed(other.bins), strict=True)
        return _Bins([(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in pairs])


def karmarkar_karp(seqlen_list: list[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Partition items by the largest differencing method (Karmarkar and Karp, 1982).

    https://en.wikipedia.org/wiki/Largest_differencing_method

    Args:
        seqlen_list: [N] lengths.
        k_partitions: how many parts.
        equal_size: whether the parts must have the same number of items.

    Returns:
        Item numbers of each part, the longest part first.

    Raises:
        UnevenPartsError: with `equal_size`, N is not a multiple of `k_partitions`.
    """
    if equal_size and len(seqlen_list) % k_partitions:
        raise UnevenPartsError(f"{len(seqlen_list)} items can't be {k_partitions} parts of equal size.")
    items: list[_Bin] = [(n, 1, ((i, n),)) for n, i in sorted((n, i) for i, n in enumerate(seqlen_list))]
    width = k_partitions if equal_size else 1
    empty: list[_Bin] = [(0, 0, ())] * (k_partitions - width)
    heap: list[_Bins] = []
    for start in range(0, len(items), width):
        heapq.heappush(heap, _Bins([*items[start : start + width], *empty]))
    while len(heap) > 1:
        first = heapq.heappop(heap)
        heapq.heappush(heap, first.merged(heapq.heappop(heap)))
    return [[item for item, _ in part[2]] for part in heap[0].bins]


def get_seqlen_balanced_partitions(seqlen_list: list[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """The parts of `karmarkar_karp`, items ascending.

    Raises:
        UnevenPartsError: there are fewer items than parts, a part has no items, or the parts can't
            have equal sizes.
    """
    if len(seqlen_list) < k_partitions:
        raise UnevenPartsError(f"number of items:[{len(seqlen_list)}] < k_partitions:[{k_partitions}]")
    parts = karmarkar_karp(seqlen_list, k_partitions, equal_size)
    if not all(parts):
        raise UnevenPartsError(f"Lengths {seqlen_list[:8]}... leave one of {k_partitions} parts empty.")
    return [sorted(part) for part in parts]
