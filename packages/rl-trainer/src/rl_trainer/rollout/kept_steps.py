"""Collects the sets of tokens that a batch samples from, step by step."""

from __future__ import annotations

import numpy as np

from rl_protocol import KeptSets
from rl_trainer.algorithms.arrays import BoolArray, IntArray


class KeptSteps:
    """The kept sets of the tokens of a batch.

    Args:
        requests: responses in the batch.
    """

    def __init__(self, requests: int) -> None:
        self._requests = requests
        self._rows: list[IntArray] = []
        self._sets: list[KeptSets] = []

    def add(self, rows: IntArray, kept: BoolArray) -> None:
        """Add the next token of some responses.

        Args:
            rows: [B] numbers of the responses.
            kept: [B, vocabulary] the tokens from which theirs was sampled.
        """
        self._rows.append(rows)
        self._sets.append(KeptSets.from_mask(kept))

    def of_each(self) -> list[KeptSets | None]:
        """The sets of the tokens of each response; None for all if nothing was added."""
        if not self._sets:
            return [None] * self._requests
        rows = np.concatenate(self._rows)
        counts = np.concatenate([one.counts for one in self._sets])
        words = np.concatenate([one.words for one in self._sets])
        order = np.argsort(rows, kind="stable")
        starts = np.cumsum(counts, dtype=np.int64) - counts
        counts = counts[order]
        ends = np.cumsum(counts, dtype=np.int64)
        words = words[np.repeat(starts[order] - (ends - counts), counts) + np.arange(len(words))]
        tokens = np.searchsorted(rows[order], np.arange(self._requests + 1))
        cuts = np.concatenate([[0], ends])[tokens]
        return [
            KeptSets(counts[tokens[i] : tokens[i + 1]], words[cuts[i] : cuts[i + 1]]) for i in range(self._requests)
        ]
