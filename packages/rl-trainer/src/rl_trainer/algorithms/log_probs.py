"""Log-probs, entropies and exact KL divergences of logits, in torch. T tokens, vocabulary V.

`linear_log_probs` computes the logits of a linear layer itself, CHUNK_BYTES of them at a time, and
again in the backward pass, so that [T, V] logits are never in memory. Logits that fit are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

CHUNK_BYTES = 64 << 20
"""Largest float32 logits that are computed at once."""


def token_log_probs(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each token and entropy of each distribution softmax(logits / temperature), nats.

    Args:
        logits: [T, V].
        tokens: int64 [T].
        temperature: > 0.

    Returns:
        log_probs [T], entropy [T], float32.
    """
    log_p = torch.log_softmax(_scaled(logits, temperature), dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, tokens[:, None]).squeeze(-1), entropy


def sum_pi_squared(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """[T] sum of the squared probabilities of softmax(logits / temperature), float32.

    Args:
        logits: [T, V].
        temperature: > 0.
    """
    return torch.softmax(_scaled(logits, temperature), dim=-1).square().sum(-1)


def log_prob_columns(logits: torch.Tensor, tokens: torch.Tensor, temperature: float, *, squares: bool) -> torch.Tensor:
    """[2 or 3, T]: both of `token_log_probs` and, with `squares`, `sum_pi_squared`."""
    columns = list(token_log_probs(logits, tokens, temperature))
    if squares:
        columns.append(sum_pi_squared(logits.detach(), temperature))
    return torch.stack(columns)


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tokens: torch.Tensor,
    temperature: float,
    *,
    squares: bool,
) -> torch.Tensor:
    """`log_prob_columns` of the logits of a linear layer; the gradient leaves out the squares.

    Args:
        hidden: [T, H], inputs of the layer.
        weight: [V, H].
        bias: [V] or None.
        tokens: int64 [T].
        temperature: > 0.
        squares: also compute `sum_pi_squared`.

    Returns:
        [2 or 3, T] float32.
    """
    if len(hidden) * len(weight) * 4 <= CHUNK_BYTES:
        logits = torch.nn.functional.linear(hidden, weight, bias)
        return log_prob_columns(logits, tokens, temperature, squares=squares)
    columns: Any = _ChunkedLogProbs.apply(hidden, weight, bias, tokens, temperature, squares)
    return columns


class _ChunkedLogProbs(torch.autograd.Function):
    """`linear_log_probs` chunk by chunk; the backward pass computes each chunk's logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        temperature: float,
        squares: bool,
    ) -> torch.Tensor:
        out = torch.empty(3 if squares else 2, len(hidden), device=hidden.device)
        for rows, log_p, room in _chunks(hidden, weight, bias, temperature):
            out[0, rows] = log_p.gather(-1, tokens[rows, None]).squeeze(-1)
            p = torch.exp(log_p, out=room)
            out[1, rows] = -torch.linalg.vecdot(p, log_p)
            if squares:
                out[2, rows] = torch.linalg.vecdot(p, p)
        ctx.save_for_backward(hidden, weight, bias, tokens, out)
        ctx.temperature = temperature
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """With p, its entropy H, and gradients g of the log-prob of token t and h of the entropy,
        the gradient of logit j is g (1 if j = t, else 0) - p_j (g + h (log p_j + H)).
        """
        hidden, weight, bias, tokens, out = ctx.saved_tensors
        of_log_prob, of_entropy, entropy = (row[:, None] for row in (*gradients[0][:2], out[1]))
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for rows, log_p, room in _chunks(hidden, weight, bias, ctx.temperature):
            p = torch.exp(log_p, out=room)
            slope = log_p.add_(entropy[rows]).mul_(of_entropy[rows]).add_(of_log_prob[rows]).mul_(p).neg_()
            slope.scatter_add_(1, tokens[rows, None], of_log_prob[rows])
            slope = slope.div_(ctx.temperature).to(weight.dtype)
            of_hidden[rows] = slope @ weight
            if of_weight is not None:
                _add_product(of_weight, slope.t(), hidden[rows])
            if of_bias is not None:
                of_bias.add_(slope.sum(0))
        sums = (None if total is None else total.to(weight.dtype) for total in (of_weight, of_bias))
        return (of_hidden, *sums, None, None, None)


def _chunks(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """(rows, their log-probs [rows, V], room for as many float32); memory is used again for each.

    Reused memory is not cleared by the operating system each time.
    """
    size = max(1, CHUNK_BYTES // (4 * len(weight)))
    shape = (min(size, len(hidden)), len(weight))
    logits, log_p = (torch.empty(shape, dtype=x, device=hidden.device) for x in (weight.dtype, torch.float32))
    room = logits if weight.dtype == torch.float32 else torch.empty_like(log_p)
    for start in range(0, len(hidden), size):
        rows = slice(start, min(start + size, len(hidden)))
        count = rows.stop - start
        scores = torch.mm(hidden[rows], weight.t(), out=logits[:count])
        if bias is not None:
            scores.add_(bias)
        if temperature != 1.0:
            scores.div_(temperature)
        yield rows, torch.log_softmax(scores, -1, dtype=torch.float32, out=log_p[:count]), room[:count]


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a @ b to a float32 sum."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


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
