"""Which rows go together, without synthetic rows: any number of trajectories of any length is cut up as it is."""

from __future__ import annotations

import numpy as np

from rl_protocol import BatchError, balanced_parts
from rl_trainer.algorithms.episodes import IntArray


def mini_batches(lengths: IntArray, parts: int, rng: np.random.Generator) -> list[list[int]]:
    """Row numbers of `parts` mini-batches: drawn at random, each row once, alike in rows and in tokens.

    Rows are sorted by length and dealt out in rounds of similar ones, in random order within each round. So sizes differ by at most one row
    and token sums by at most the longest row, while every epoch mixes anew.

    Args:
        lengths: [N] tokens per row.
        parts: mini-batches, at most N (a batch without rows has no gradient).
        rng: decides who meets whom.

    Raises:
        BatchError: parts not within 1..N.
    """
    rows = lengths.size
    if not 1 <= parts <= rows:
        raise BatchError(
            f"{rows} rows can't be cut into {parts} mini-batches; set ppo_mini_batch_size to at most the rows of a step."
        )
    order = rng.permutation(rows)
    order = order[np.argsort(-lengths[order], kind="stable")]
    dealt: list[list[int]] = [[] for _ in range(parts)]
    for start in range(0, rows, parts):
        cards = order[start : start + parts]
        for part, card in zip(rng.permutation(parts)[: cards.size].tolist(), cards.tolist(), strict=True):
            dealt[part].append(card)
    return [sorted(part) for part in dealt]


def micro_batches(lengths: IntArray, max_tokens: int) -> list[list[int]]:
    """Row numbers of as few parts as longest-first packing finds, none above `max_tokens` tokens; every row is in one part.

    Raises:
        BatchError: a row that is longer than max_tokens by itself.
    """
    if not lengths.size:
        return []
    if int(lengths.max()) > max_tokens:
        row = int(lengths.argmax())
        raise BatchError(
            f"Row {row} has {int(lengths[row])} tokens, more than the {max_tokens} of a micro-batch; raise that number."
        )
    for parts in range(max(-(-int(lengths.sum()) // max_tokens), 1), lengths.size + 1):
        plan = balanced_parts(lengths, parts)
        if max(int(lengths[rows].sum()) for rows in plan) <= max_tokens:
            return plan
    raise AssertionError("one row per part fits, as no row is longer than max_tokens")
