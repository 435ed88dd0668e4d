"""Parts of mini-batches, and the numbers that are added over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl_megatron_peft.backend.parallel import Ranks, all_gather_json
from rl_protocol import BatchData

FORWARD_TOKENS = 16384
"""Most tokens of a pass without gradients, with padding, where no number is set."""


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


def micro_batches_of(batch: BatchData, rows: Sequence[int], size: int, tokens: int = 0) -> list[BatchData]:
    """Divide the rows into parts of at most `size` rows and `tokens` tokens, each if above 0.

    Every row counts as long as the longest of its part, and one with more tokens is a part of its
    own. The rows stay in order where no part has too many tokens; otherwise they are sorted,
    longest first, so that rows of about one length share a part.
    """
    lengths = _lengths_of(batch)
    size = size or max(len(rows), 1)
    rows = list(rows)
    longest = int(lengths[rows].max(initial=1))
    tokens = tokens or longest * size
    if min(size, len(rows)) * longest > tokens:
        rows.sort(key=lambda row: -int(lengths[row]))
    parts = list[BatchData]()
    while rows:
        fitting = max(1, min(size, tokens // max(int(lengths[rows].max()), 1)))
        parts.append(batch.select_rows(rows[:fitting]))
        rows = rows[fitting:]
    return parts


def forward_rows_of(batch: BatchData, most: int, tokens: int = 0) -> int:
    """Rows per pass without gradients: at most `most`, and as many as have `tokens` tokens (0:
    FORWARD_TOKENS) where each is padded to the longest; at least 1."""
    longest = int(_lengths_of(batch).max(initial=1))
    return max(1, min(most, (tokens or FORWARD_TOKENS) // longest))


def _lengths_of(batch: BatchData) -> npt.NDArray[np.int64]:
    """Tokens of each row, [N]."""
    return batch.ragged("prompts").lengths + batch.ragged("responses").lengths


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
