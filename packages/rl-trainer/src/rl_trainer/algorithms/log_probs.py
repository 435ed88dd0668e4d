"""Log-probs, entropies and exact KL divergences of logits, in torch. T tokens, vocabulary V.

`linear_log_probs` computes the logits of a linear layer itself, CHUNK_BYTES of them at a time, and
again in the backward pass, so that [T, V] logits are never in memory. Logits that fit are kept.

The fused functions of liger-kernel 0.8.5 do not compute these columns:

* `LigerFusedLinearCrossEntropyFunction` returns no entropy. Before 0.8.2, with a loss per token, it
  also multiplied the gradients of all tokens by that of the first.
* `LigerFusedLinearScaledCrossEntropyFunction` returns the entropy in the element type of `hidden`,
  and has no bias, no excluded tokens, no squares and no largest log-probs. Further tokens are the
  same in all T rows. On a Hopper GPU it needs CuTe DSL and bfloat16. By default it is torch code
  elsewhere, with several float32 tensors [512, V] at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rl_protocol.kept_tokens import EXCLUDED, KeptTokens
from rl_trainer.kernels.linear import linear, product

CHUNK_BYTES = 64 << 20
"""Largest float32 logits that are computed at once."""


def sum_pi_squared(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """[T] sum of the squared probabilities of softmax(logits / temperature), float32.

    Args:
        logits: [T, V].
        temperature: > 0.
    """
    return torch.softmax(_scaled(logits, temperature), dim=-1).square().sum(-1)


def log_prob_columns(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    temperature: float,
    *,
    squares: bool,
    top: int = 0,
    kept: KeptTokens | None = None,
) -> torch.Tensor:
    """Statistics of the distributions softmax(logits / temperature), nats.

    Args:
        logits: [T, V].
        tokens: int64 [T], or several for each distribution, [T, J].
        temperature: > 0.
        squares: also compute `sum_pi_squared`.
        top: also find that many of the most probable tokens.
        kept: the tokens that each distribution is over; None: all. Others have the log-prob
            EXCLUDED, about.

    Returns:
        float32 [rows, T]: the log-prob of each of the J tokens, the entropy, with `squares` the sum
        of squares, the largest `top` log-probs, and the ids of their tokens, which float32 holds
        exactly up to 2^24.
    """
    scores = _scaled(logits, temperature)
    if kept is not None:
        scores = kept.restricted(scores)
    log_p = torch.log_softmax(scores, dim=-1)
    rows = [*log_p.gather(-1, _several(tokens)).unbind(-1), -(log_p.exp() * log_p).sum(-1)]
    if squares:
        rows.append(sum_pi_squared(scores.detach(), 1.0))
    if top:
        rows += _top_rows(log_p.detach(), top)
    return torch.stack(rows)


def _several(tokens: torch.Tensor) -> torch.Tensor:
    """int64 [T, J] from [T] or [T, J]."""
    return tokens[:, None] if tokens.dim() == 1 else tokens


def _top_rows(log_p: torch.Tensor, top: int) -> list[torch.Tensor]:
    """The largest log-probs, and then their tokens, `top` rows [T] of each."""
    found = log_p.topk(top, dim=-1)
    return [*found.values.unbind(-1), *found.indices.float().unbind(-1)]


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tokens: torch.Tensor,
    temperature: float,
    *,
    squares: bool,
    top: int = 0,
    kept: KeptTokens | None = None,
) -> torch.Tensor:
    """`log_prob_columns` of the logits of a linear layer.

    The gradient is that of the log-probs of `tokens` and of the entropy.

    Args:
        hidden: [T, H], inputs of the layer.
        weight: [V, H].
        bias: [V] or None.
        tokens, temperature, squares, top, kept: as there.
    """
    if len(hidden) * len(weight) * 4 <= CHUNK_BYTES:
        logits = linear(hidden, weight, bias)
        return log_prob_columns(logits, tokens, temperature, squares=squares, top=top, kept=kept)
    columns: Any = _ChunkedLogProbs.apply(hidden, weight, bias, _several(tokens), temperature, squares, top, kept)
    return columns


class _ChunkedLogProbs(torch.autograd.Function):
    """`linear_log_probs` for some tokens at a time; the backward pass computes the logits again,
    for all tokens and a part of the vocabulary at a time, so that it writes the gradient of each
    weight once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        temperature: float,
        squares: bool,
        top: int,
        kept: KeptTokens | None,
    ) -> torch.Tensor:
        several = tokens.shape[1]
        out = torch.empty(several + 1 + squares + 2 * top, len(hidden), device=hidden.device)
        largest, rest = torch.empty(2, len(hidden), 1, device=hidden.device)
        size = max(1, CHUNK_BYTES // (4 * len(weight)))
        room = _Scores(hidden[:size], weight)
        log_p = torch.empty_like(room.single)
        for rows in _slices(len(hidden), size):
            excluded = None if kept is None else kept.excluded(rows, len(weight))
            scores = room.of(hidden[rows], weight, bias, temperature, excluded)
            # the result is in memory that is used again, so the system does not clear it each time
            log_p = torch.log_softmax(scores, -1, out=log_p[: len(scores)])
            largest[rows] = scores.amax(-1, keepdim=True)
            rest[rows] = log_p.amax(-1, keepdim=True).neg()
            out[:several, rows] = log_p.gather(-1, tokens[rows]).t()
            p = torch.exp(log_p, out=scores)
            out[several, rows] = -torch.linalg.vecdot(p, log_p)
            if squares:
                out[several + 1, rows] = torch.linalg.vecdot(p, p)
            if top:
                out[-2 * top :, rows] = torch.stack(_top_rows(log_p, top))
        ctx.save_for_backward(hidden, weight, bias, tokens, out, largest, rest)
        ctx.temperature, ctx.kept = temperature, kept
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """With p, its entropy H, and gradients g_t of the log-prob of each token t and h of the
        entropy, the gradient of logit j is g_j (0 for other tokens) - p_j (sum of g + h (log p_j +
        H)). That of an excluded token is 0.
        """
        hidden, weight, bias, tokens, out, largest, rest = ctx.saved_tensors
        several = tokens.shape[1]
        of_log_prob = gradients[0][:several].t()
        of_entropy, entropy = gradients[0][several][:, None], out[several][:, None]
        of_all = of_log_prob.sum(1, keepdim=True)
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        of_block = torch.empty_like(hidden)
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        size = max(1, CHUNK_BYTES // (4 * len(hidden)))
        room = _Scores(hidden, weight[:size])
        p = torch.empty_like(room.single)
        for block in _slices(len(weight), size):
            excluded = None if ctx.kept is None else ctx.kept.excluded(slice(0, len(hidden)), len(weight), block)
            some = None if bias is None else bias[block]
            log_p = room.of(hidden, weight[block], some, ctx.temperature, excluded).sub_(largest).sub_(rest)
            p = torch.exp(log_p, out=p[:, : log_p.shape[1]])
            slope = log_p.add_(entropy).mul_(of_entropy).add_(of_all).mul_(p).neg_()
            places = tokens - block.start
            inside = (places >= 0) & (places < slope.shape[1])
            slope.scatter_add_(1, places.clamp(0, slope.shape[1] - 1), of_log_prob * inside)
            if excluded is not None:
                slope.masked_fill_(excluded, 0.0)
            slope = slope.div_(ctx.temperature).to(weight.dtype)
            of_hidden.add_(product(slope, weight[block].t(), of_block))
            if of_weight is not None:
                torch.mm(slope.t(), hidden, out=of_weight[block])
            if of_bias is not None:
                of_bias[block] = slope.sum(0)
        return (of_hidden.to(hidden.dtype), of_weight, of_bias, *(None,) * 5)


class _Scores:
    """Memory for the scores of a part of the tokens and of the vocabulary, used for each part.

    Reused memory is not cleared by the operating system each time.

    Args:
        hidden: [t, H] of the largest part.
        weight: [v, H] of the largest part.
    """

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        shape = (len(hidden), len(weight))
        self._logits = torch.empty(shape, dtype=weight.dtype, device=hidden.device)
        self.single = self._logits.float()
        """[t, v], float32."""

    def of(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        temperature: float,
        excluded: torch.Tensor | None,
    ) -> torch.Tensor:
        """float32 [t, v], of the logits divided by the temperature, valid until the next call."""
        part = (slice(0, len(hidden)), slice(0, len(weight)))
        scores = product(hidden, weight, self._logits[part])
        if bias is not None:
            scores.add_(bias)
        if temperature != 1.0:
            scores.div_(temperature)
        if excluded is not None:
            scores.masked_fill_(excluded, EXCLUDED)
        return scores if scores.dtype == torch.float32 else self.single[part].copy_(scores)


def _slices(total: int, size: int) -> Iterator[slice]:
    """Parts of at most `size`."""
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def full_kl(logits: torch.Tensor, ref_logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """[T] exact KL(policy || reference) of each next-token distribution, nats, differentiable.

    Args:
        logits, ref_logits: [T, V].
        temperature: divides both.
    """
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    log_q = torch.log_softmax(ref_logits.float() / temperature, dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """logits / temperature in float32; no copy of float32 logits at temperature 1."""
    return logits.float() if temperature == 1.0 else logits.float() / temperature
