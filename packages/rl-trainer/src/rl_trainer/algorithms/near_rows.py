"""Moves rows to ranks of the hosts that have them, as far as the ranks stay balanced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from rl_trainer.algorithms.arrays import IntArray

Dealt: TypeAlias = Sequence[Sequence[Sequence[int]]]
"""Row numbers by rank and mini-batch."""


@dataclass(frozen=True, kw_only=True)
class NearRows:
    """Which rows are near which ranks.

    Attributes:
        nbytes: [N, P] bytes of each row on the host of each of P ranks.
        slack: part of the tokens of the busiest rank that a rank may have more, >= 0.
    """

    nbytes: IntArray
    slack: float

    def deal(self, lengths: IntArray, plain: Dealt) -> Dealt:
        """Deal the rows of each mini-batch again.

        The longest rows choose first: each goes to the rank with most of its bytes, of several the
        one with the fewest tokens, that stays below the limit. In each mini-batch and in all of
        them together, no rank gets more than 1 + `slack` times the tokens that the busiest rank of
        `plain` has there, and each rank gets a row. A mini-batch without such a choice stays as in
        `plain`. So do all of them, if the ranks then read fewer bytes of other hosts.

        Args:
            lengths: [N] tokens per row.
            plain: the rows of each rank, dealt by tokens alone; each rank has a row.

        Returns:
            `plain` itself, or the same mini-batches with other ranks.
        """
        loads = [0] * len(plain)
        steps = [self._deal_one(lengths, parts, loads) for parts in zip(*plain, strict=True)]
        dealt = [[parts[rank] for parts in steps] for rank in range(len(plain))]
        even, near = _tokens(lengths, plain), _tokens(lengths, dealt)
        balanced = max(near) <= (1 + self.slack) * max(even) and all(any(parts) for parts in dealt)
        return dealt if balanced and self.local_bytes(dealt) > self.local_bytes(plain) else plain

    def local_bytes(self, dealt: Dealt) -> int:
        """Bytes of the rows that are on the hosts of their ranks; each rank reads a row once."""
        return sum(
            int(self.nbytes[sorted({row for part in parts for row in part}), rank].sum())
            for rank, parts in enumerate(dealt)
        )

    def _deal_one(self, lengths: IntArray, plain: Sequence[Sequence[int]], loads: list[int]) -> Sequence[Sequence[int]]:
        """Deal one mini-batch; `loads` are the tokens of each rank in all before, and get these
        added.
        """
        limit = (1 + self.slack) * max(int(lengths[list(part)].sum()) for part in plain)
        parts, here = [list[int]() for _ in plain], [0] * len(plain)
        rows = np.array(sorted(row for part in plain for row in part), np.int64)
        for row in rows[np.argsort(-lengths[rows], kind="stable")].tolist():
            tokens, near = int(lengths[row]), self.nbytes[row].tolist()
            fits = [rank for rank, load in enumerate(here) if load + tokens <= limit]
            if not fits:
                parts = [list(part) for part in plain]
                here = [int(lengths[part].sum()) for part in parts]
                break
            rank = min(fits, key=lambda rank: (-near[rank], here[rank], loads[rank], rank))
            parts[rank].append(row)
            here[rank] += tokens
        loads[:] = [load + tokens for load, tokens in zip(loads, here, strict=True)]
        return [sorted(part) for part in parts]


def _tokens(lengths: IntArray, dealt: Dealt) -> list[int]:
    return [sum(int(lengths[list(part)].sum()) for part in parts) for parts in dealt]
