"""Which rows go together, without synthetic rows: any number of trajectories of any length is cut up as it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rl_protocol import BatchError, balanced_parts
from rl_trainer.algorithms.episodes import IntArray


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the batch of a step is cut up for its optimizer steps."""

    epochs: int
    mini_batch_rows: int
    seed: int


def schedule_rows(lengths: IntArray, schedule: Schedule, update: int) -> Iterator[list[int]]:
    """Row numbers of each mini-batch, alike in tokens; every epoch deals the rows anew, drawn from (seed, update, epoch).

    There are as many mini-batches as needed to keep each within `mini_batch_rows`; `lengths` [N] are the tokens of each row.
    """
    for epoch in range(schedule.epochs if lengths.size else 0):
        rng = np.random.default_rng((schedule.seed, update, epoch))
        yield from mini_batches(lengths, -(-lengths.size // schedule.mini_batch_rows), rng)


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one of several ranks does in an update.

    Attributes:
        rows: row numbers of the batch it needs.
        mini_batches: for each optimizer step, places in `rows`; none in a step that has no row for this rank.
    """

    rows: tuple[int, ...]
    mini_batches: tuple[tuple[int, ...], ...]


def share_out(lengths: IntArray, schedule: Schedule, update: int, ranks: int) -> list[Share]:
    """The same mini-batches as `schedule_rows` gives, each dealt to the ranks so that they are alike in tokens.

    Of a mini-batch's parts the heaviest goes to the rank that has the least so far: the ranks stay alike over the whole update, and
    mini-batches with fewer rows than ranks leave nobody out.

    Raises:
        BatchError: fewer rows than ranks.
    """
    if lengths.size < ranks:
        raise BatchError(
            f"{lengths.size} rows can't give each of {ranks} ranks one; set train_batch_size * rollout.n to at least the number of ranks."
        )
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    load = [(0, 0)] * ranks
    for mini in schedule_rows(lengths, schedule, update):
        parts = [[mini[place] for place in places] for places in balanced_parts(lengths[mini], ranks)]
        parts.sort(key=lambda part: (int(lengths[part].sum()), len(part)), reverse=True)
        for rank, part in zip(sorted(range(ranks), key=load.__getitem__), parts, strict=True):
            dealt[rank].append(part)
            load[rank] = load[rank][0] + int(lengths[part].sum()), load[rank][1] + len(part)
    shares: list[Share] = []
    for steps in dealt:
        rows = sorted({row for step in steps for row in step})
        place = {row: i for i, row in enumerate(rows)}
        shares.append(Share(rows=tuple(rows), mini_batches=tuple(tuple(place[row] for row in step) for step in steps)))
    return shares


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
