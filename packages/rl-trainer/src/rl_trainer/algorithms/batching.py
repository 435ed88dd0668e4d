"""Splits a batch into mini-batches, ranks and micro-batches of balanced token counts.

Any number of trajectories of any length can be split, without padding rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rl_protocol import BatchError, balanced_parts
from rl_protocol.counted import counted
from rl_trainer.algorithms.arrays import IntArray
from rl_trainer.algorithms.near_rows import NearRows
from rl_trainer.config.optim import Schedule


def schedule_rows(lengths: IntArray, schedule: Schedule, update: int) -> Iterator[list[int]]:
    """Row numbers of each mini-batch of an update, balanced in tokens.

    Every epoch draws new mini-batches from (seed, update, epoch), as many as needed to keep each
    within `mini_batch_rows`.

    Args:
        lengths: [N] tokens per row.
        schedule: epochs, size of mini-batches, seed.
        update: number of the update.
    """
    for epoch in range(schedule.epochs if lengths.size else 0):
        rng = np.random.default_rng((schedule.seed, update, epoch))
        yield from mini_batches(lengths, -(-lengths.size // schedule.mini_batch_rows), rng)


@dataclass(frozen=True, kw_only=True)
class RankBatches:
    """The part of an update that one rank computes.

    Attributes:
        rows: row numbers of the batch that the rank needs.
        mini_batches: for each optimizer step, indices into `rows`; empty in a step without rows for
            this rank.
    """

    rows: tuple[int, ...]
    mini_batches: tuple[tuple[int, ...], ...]


def split_over_ranks(
    lengths: IntArray, schedule: Schedule, update: int, ranks: int, near: NearRows | None = None
) -> list[RankBatches]:
    """The mini-batches of `schedule_rows`, each split over ranks with similar token counts.

    Of a mini-batch's parts, the heaviest goes to the rank with the fewest tokens so far. The ranks
    stay balanced over the whole update, also when mini-batches have fewer rows than there are
    ranks.

    Args:
        lengths: [N] tokens per row.
        schedule: see `schedule_rows`.
        update: number of the update.
        ranks: number of data-parallel ranks.
        near: which rows the ranks prefer; None: none.

    Raises:
        BatchError: fewer rows than ranks.
    """
    if lengths.size < ranks:
        raise BatchError(
            f"{counted(lengths.size, 'row')} can't give each of {ranks} ranks one; raise PromptOrder.batch_size or RolloutConfig.n."
        )
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    load = [(0, 0)] * ranks
    for mini in schedule_rows(lengths, schedule, update):
        parts = [[mini[place] for place in places] for places in balanced_parts(lengths[mini], ranks)]
        parts.sort(key=lambda part: (int(lengths[part].sum()), len(part)), reverse=True)
        for rank, part in zip(sorted(range(ranks), key=load.__getitem__), parts, strict=True):
            dealt[rank].append(part)
            load[rank] = load[rank][0] + int(lengths[part].sum()), load[rank][1] + len(part)
    result: list[RankBatches] = []
    for steps in dealt if near is None else near.deal(lengths, dealt):
        rows = sorted({row for step in steps for row in step})
        place = {row: i for i, row in enumerate(rows)}
        result.append(
            RankBatches(rows=tuple(rows), mini_batches=tuple(tuple(place[row] for row in step) for step in steps))
        )
    return result


def mini_batches(lengths: IntArray, parts: int, rng: np.random.Generator) -> list[list[int]]:
    """Row numbers of `parts` random mini-batches with similar numbers of rows and tokens.

    Each row occurs once. Rows are sorted by length and dealt out in rounds of similar length, in
    random order within each round. So sizes differ by at most one row, and token counts by at most
    the longest row.

    Args:
        lengths: [N] tokens per row.
        parts: mini-batches, at most N (a batch without rows has no gradient).
        rng: source of the random order.

    Raises:
        BatchError: parts is not within 1..N.
    """
    rows = lengths.size
    if not 1 <= parts <= rows:
        raise BatchError(
            f"{counted(rows, 'row')} can't be split into {parts} mini-batches; set ppo_mini_batch_size to at most the rows of a step."
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
    """Row numbers of micro-batches of at most `max_tokens` tokens, packed longest first.

    Raises:
        BatchError: a single row is longer than max_tokens.
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
