"""Parts of mini-batches, and the numbers that are added over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_megatron_peft.backend.parallel import Ranks, all_gather_json
from rl_protocol import BatchData

FORWARD_TOKENS = 16384
"""Most tokens of a pass without gradients, with padding, unless one row has more."""


@dataclass(frozen=True, slots=True)
class MiniBatchCounts:
    """Sizes of a mini-batch over all replicas, by which losses are divided.

    Attributes:
        tokens: unmasked response tokens.
        sequences: trajectories with at least one unmasked token.
    """

    tokens: int
    sequences: int


MetricSums = Mapping[str, tuple[float, float]]
"""Metric name -> (sum, weight): both are added over micro-batches, the metric is sum / weight."""


def micro_batches_of(batch: BatchData, rows: Sequence[int], size: int) -> list[BatchData]:
    """Divide the rows, in order, into parts of at most `size` (0: one part)."""
    size = size or max(len(rows), 1)
    return [batch.select_rows(list(rows[start : start + size])) for start in range(0, len(rows), size)]


def forward_rows_of(batch: BatchData, most: int) -> int:
    """Rows per pass without gradients: at most `most`, and as many as have FORWARD_TOKENS tokens
    where each is padded to the longest; at least 1."""
    lengths = batch.ragged("prompts").lengths + batch.ragged("responses").lengths
    return max(1, min(most, FORWARD_TOKENS // int(lengths.max(initial=1))))


def count_tokens(batch: BatchData, rows: Sequence[int], ranks: Ranks) -> MiniBatchCounts:
    """Count the unmasked tokens of a mini-batch over all replicas; a collective."""
    lengths = [int(row.sum()) for row in batch.select_rows(list(rows)).ragged("response_mask").rows()]
    own = [sum(lengths), sum(length > 0 for length in lengths)]
    counts_for_replica = ranks.tensor == 0 and ranks.last
    found = all_gather_json(own if counts_for_replica else [0, 0], ranks.device)
    return MiniBatchCounts(tokens=sum(f[0] for f in found), sequences=sum(f[1] for f in found))


def add_sums(total: dict[str, tuple[float, float]], more: MetricSums) -> None:
    """Add sums and weights to those of `total`."""
    for name, (value, weight) in more.items():
        before = total.get(name, (0.0, 0.0))
        total[name] = before[0] + value, before[1] + weight
