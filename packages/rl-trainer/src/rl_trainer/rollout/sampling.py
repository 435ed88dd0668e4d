"""Chooses the next tokens of a batch: temperature, top-k, top-p, random numbers by request."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from rl_protocol.ports import GenerationRequest, SamplingParams
from rl_trainer.backends.world import CPU


def uniforms(seed: int, requests: Sequence[GenerationRequest], count: int) -> np.ndarray[Any, Any]:
    """[N, count] random numbers in [0, 1), of each response by SHAKE-128 from (seed, uid, session).

    They depend neither on the batch, nor on the worker, nor on the order of arrival.
    """
    names = (f"{seed}/{request.uid}/{request.session}" for request in requests)
    bits = b"".join(hashlib.shake_128(name.encode()).digest(8 * count) for name in names)
    return (np.frombuffer(bits, "<u8") >> 11).reshape(-1, count) * 2.0**-53  # all bits of a double's fraction


class Sampled(NamedTuple):
    """The next token of each of B rows.

    Attributes:
        tokens: int64 [B].
        log_probs: float32 [B], under softmax(logits / temperature), over the kept tokens if
            `kept` is there.
        kept: bool [B, vocabulary], the tokens that top-p and top-k keep; None: not asked for.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    kept: torch.Tensor | None


class Sampler:
    """Samples by inverse transform: a row's random number selects the token whose share of the unit
    interval contains it.

    Args:
        requests: one per row.
        params: temperature 0 takes the most probable tokens.
        banned: tokens that are never chosen. Kept sets lack them; without these, log-probs are
            unaffected.
        device: of the logits.
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        banned: Sequence[int],
        device: torch.device = CPU,
    ) -> None:
        self._temperature = params.temperature
        self._banned = torch.tensor(banned, dtype=torch.int64, device=device)
        self._reports_kept = params.reports_kept_sets
        self._warpers = LogitsProcessorList()
        self._numbers: torch.Tensor | None = None
        if params.temperature == 0:
            return
        if params.top_k:
            self._warpers.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            self._warpers.append(TopPLogitsWarper(params.top_p))
        numbers = uniforms(params.seed, requests, params.max_new_tokens)
        self._numbers = torch.from_numpy(numbers).to(device)

    def __call__(self, logits: torch.Tensor, rows: torch.Tensor, step: int) -> Sampled:
        """Choose a token for each row.

        Args:
            logits: [B, vocabulary].
            rows: int64 [B], the request of each row.
            step: how many tokens the rows have already.
        """
        scores = logits.float()
        if self._temperature not in (0, 1):
            scores = scores / self._temperature
        log_probs = torch.log_softmax(scores, dim=-1)
        allowed = self._allowed(scores, log_probs)
        if self._numbers is None:
            tokens = allowed.argmax(-1)
        else:
            with _prefix_sums_allowed():
                cumulative = allowed.exp().cumsum(-1, dtype=torch.float64)
            target = self._numbers[rows, step, None] * cumulative[:, -1:]
            tokens = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=scores.shape[-1] - 1)
        chosen_from = allowed if self._reports_kept else log_probs
        kept = allowed > -math.inf if self._reports_kept else None
        return Sampled(tokens, chosen_from.gather(-1, tokens[:, None])[:, 0], kept)

    def _allowed(self, scores: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
        """Log-probs after bans, top-k and top-p, up to a constant per row."""
        if not len(self._banned) and not self._warpers:
            return log_probs
        if len(self._banned):
            scores = scores.index_fill(-1, self._banned, float("-inf"))
        unused = cast(torch.LongTensor, scores.new_empty((len(scores), 0), dtype=torch.int64))
        with _prefix_sums_allowed():  # top-p
            return torch.log_softmax(self._warpers(unused, cast(torch.FloatTensor, scores)), dim=-1)


@contextmanager
def _prefix_sums_allowed() -> Generator[None]:
    """Allow what deterministic algorithms exclude on a GPU: the prefix sums of floats.

    Two runs may differ in the last bit of such a sum, which selects another token only if the
    random number lies within that bit.
    """
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)
