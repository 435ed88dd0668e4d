"""Collects what is recorded of the tokens of a batch, step by step: kept sets and experts."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch

from rl_protocol import KeptSets
from rl_protocol.batch.routed_experts import ExpertIds
from rl_trainer.algorithms.arrays import BoolArray, IntArray
from rl_trainer.backends.experts.routing import ExpertRouting


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


class RoutedSteps:
    """The experts of the prompts of a batch, and of the tokens that follow them.

    Args:
        experts: routers of the model.
        source: int64 [B], the prompt of each request.
        real: bool [P, L], the tokens of the prompts, padded on the left.
        steps: most tokens of a response.
    """

    def __init__(self, experts: ExpertRouting, source: torch.Tensor, real: torch.Tensor, steps: int) -> None:
        self._experts, self._source, self._real = experts, source, real
        shape = experts.layers, experts.top_k
        self._prompts = torch.zeros((*real.shape, *shape), dtype=torch.int16)
        self._made = torch.zeros((len(source), steps, *shape), dtype=torch.int16)

    @contextmanager
    def recording(self, rows: torch.Tensor, step: int) -> Generator[None]:
        """Record the forward pass within it.

        Args:
            rows: int64 [b], the requests whose token number `step` it computes.
            step: tokens of each response before the pass; 0: it computes the prompts.
        """
        with self._experts.recording() as chosen:
            yield
            found = torch.stack([layer for layer in chosen if layer is not None], 1).to("cpu", torch.int16)
        if step:
            self._made[rows.cpu(), step - 1] = found
        else:
            self._prompts = found.view(self._prompts.shape)

    def of(self, row: int, tokens: int) -> ExpertIds:
        """int16 [P + tokens - 1, layers, K] of a request with a response of `tokens` tokens."""
        prompt = self._prompts[self._source[row]][self._real[self._source[row]].cpu()]
        return np.concatenate([prompt.numpy(), self._made[row, : tokens - 1].numpy()])
