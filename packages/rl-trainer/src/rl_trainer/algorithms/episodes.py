"""Sessions as episodes: what the estimators see of a ragged batch.

A session is one episode. It may have been written as several trajectories (context resets, several agents): they are its consecutive segments,
the last one (highest index) is scored, and the score is received at the episode's last token. Tokens the policy did not make belong to the
environment; the episode steps over them.

Everything is in one canonical order (uid, session, index, place), so no result depends on the order of the batch's rows, not even in its last bit.

N rows, T tokens, S sessions, G groups, M tokens made by the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rl_protocol import BatchError, RowKey
from rl_protocol.columns import gather_ranges

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


def sum_by(labels: npt.NDArray[np.integer], values: npt.ArrayLike, size: int) -> FloatArray:
    """Sums of `values` by label 0..size-1, added up in the order given."""
    return np.bincount(labels, weights=values, minlength=size).astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """The S sessions of a batch, ordered by (uid, session); those of one uid form a group."""

    tokens: IntArray
    """[M] places in the flat token arrays, episode by episode."""
    offsets: IntArray
    """[S + 1] into `tokens`."""
    group: IntArray
    """[S] 0..G-1, ascending."""
    final_row: IntArray
    """[S] the row that is scored."""

    @property
    def lengths(self) -> IntArray:
        """[S] tokens the policy made."""
        return np.diff(self.offsets)

    @property
    def counts(self) -> BoolArray:
        """[S] false for a session without a token to learn from (rejected as a whole): no baseline sees it."""
        return self.lengths > 0

    @property
    def num_groups(self) -> int:
        return int(self.group[-1]) + 1 if self.group.size else 0

    def per_token(self, values: FloatArray) -> FloatArray:
        """[M] each session's value on each of its tokens."""
        return np.repeat(values, self.lengths)

    def sums(self, stream: FloatArray) -> FloatArray:
        """[S] sums of [M] by session."""
        session = np.repeat(np.arange(self.lengths.size), self.lengths)
        return sum_by(session, stream, self.lengths.size)

    def scatter(self, stream: FloatArray, total: int) -> FloatArray:
        """[T] with the [M] values at their tokens and 0 elsewhere."""
        flat = np.zeros(total)
        flat[self.tokens] = stream
        return flat

    def discounted(self, stream: FloatArray, factor: float) -> FloatArray:
        """[M] y_t = x_t + factor * y_{t+1} within each episode."""
        out = stream.copy()
        order = np.argsort(-self.lengths, kind="stable")
        ends, lengths = self.offsets[1:][order], self.lengths[order]
        for back in range(1, int(lengths.max(initial=0))):
            place = ends[: np.searchsorted(-lengths, -back, side="left")] - 1 - back
            out[place] += factor * out[place + 1]
        return out

    def following(self, stream: FloatArray) -> FloatArray:
        """[M] the value at the episode's next token, 0 after its last."""
        out = np.zeros_like(stream)
        out[:-1] = stream[1:]
        out[self.offsets[1:][self.counts] - 1] = 0.0
        return out


def episodes(keys: Sequence[RowKey], offsets: IntArray, mask: BoolArray) -> Episodes:
    """Arrange the rows named by `keys` [N], whose tokens lie at `offsets` [N + 1]; `mask` bool [T] is true where the policy made the token.

    Raises:
        BatchError: two rows of one name.
    """
    order = sorted(range(len(keys)), key=lambda i: (keys[i].uid, keys[i].session, keys[i].index))
    ranked = [keys[i] for i in order]
    for one, other in pairwise(ranked):
        if one == other:
            raise BatchError(f"Two rows of the batch are named {one.text!r}; every trajectory has its own key.")
    new_uid = np.ones(len(ranked), np.bool_)
    new_uid[1:] = [one.uid != other.uid for one, other in pairwise(ranked)]
    new_session = np.ones(len(ranked), np.bool_)
    new_session[1:] = [(one.uid, one.session) != (other.uid, other.session) for one, other in pairwise(ranked)]
    first = np.flatnonzero(new_session)
    last = np.append(first[1:], len(ranked)) - 1 if first.size else first
    rows = np.array(order, dtype=np.int64)
    places, row_offsets = gather_ranges(offsets, rows)
    made = mask[places]
    before = np.concatenate([[0], np.cumsum(made, dtype=np.int64)])
    session_starts = row_offsets[np.append(first, len(ranked))] if first.size else np.zeros(1, np.int64)
    return Episodes(
        tokens=places[made],
        offsets=before[session_starts],
        group=(np.cumsum(new_uid) - 1)[first].astype(np.int64),
        final_row=rows[last],
    )
