"""Log-probs, entropies and exact KL divergences of logits, in torch. T tokens, vocabulary V.

`linear_log_probs` computes the logits of a linear layer itself, CHUNK_BYTES of them at a time, and
again in the backward pass, so that [T, V] logits are never in memory. Logits that fit are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rl_protocol.kept_tokens import EXCLUDED, KeptTokens

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
        logits = torch.nn.functional.linear(hidden, weight, bias)
        return log_prob_columns(logits, tokens, temperature, squares=squares, top=top, kept=kept)
    columns: Any = _ChunkedLogProbs.apply(hidden, weight, bias, _several(tokens), temperature, squares, top, kept)
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
        top: int,
        kept: KeptTokens | None,
    ) -> torch.Tensor:
        several = tokens.shape[1]
        out = torch.empty(several + 1 + squares + 2 * top, len(hidden), device=hidden.device)
        for rows, log_p, room, _ in _chunks(hidden, weight, bias, temperature, kept):
            out[:several, rows] = log_p.gather(-1, tokens[rows]).t()
            p = torch.exp(log_p, out=room)
            out[several, rows] = -torch.linalg.vecdot(p, log_p)
            if squares:
                out[several + 1, rows] = torch.linalg.vecdot(p, p)
            if top:
                out[-2 * top :, rows] = torch.stack(_top_rows(log_p, top))
        ctx.save_for_backward(hidden, weight, bias, tokens, out)
        ctx.temperature, ctx.kept = temperature, kept
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """With p, its entropy H, and gradients g_t of the log-prob of each token t and h of the
        entropy, the gradient of logit j is g_j (0 for other tokens) - p_j (sum of g + h (log p_j +
        H)). That of an excluded token is 0.
        """
        hidden, weight, bias, tokens, out = ctx.saved_tensors
        several = tokens.shape[1]
        of_log_prob = gradients[0][:several].t()
        of_entropy, entropy = gradients[0][several][:, None], out[several][:, None]
        of_all = of_log_prob.sum(1, keepdim=True)
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for rows, log_p, room, excluded in _chunks(hidden, weight, bias, ctx.temperature, ctx.kept):
            p = torch.exp(log_p, out=room)
            slope = log_p.add_(entropy[rows]).mul_(of_entropy[rows]).add_(of_all[rows]).mul_(p).neg_()
            slope.scatter_add_(1, tokens[rows], of_log_prob[rows])
            if excluded is not None:
                slope.masked_fill_(excluded, 0.0)
            slope = slope.div_(ctx.temperature).to(weight.dtype)
            of_hidden[rows] = slope @ weight
            if of_weight is not None:
                _add_product(of_weight, slope.t(), hidden[rows])
            if of_bias is not None:
                of_bias.add_(slope.sum(0))
        sums = (None if total is None else total.to(weight.dtype) for total in (of_weight, of_bias))
        return (of_hidden, *sums, *(None,) * 5)


def _chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: float,
    kept: KeptTokens | None,
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """(rows, their log-probs [rows, V], room for as many float32, bool [rows, V] what `kept`
    excludes); memory is used again for each.

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
        excluded = None if kept is None else kept.excluded(rows, len(weight))
        if excluded is not None:
            scores.masked_fill_(excluded, EXCLUDED)
        # log_softmax would allocate memory for the float32 scores of each chunk
        single = scores if scores.dtype == torch.float32 else room[:count].copy_(scores)
        yield rows, torch.log_softmax(single, -1, out=log_p[:count]), room[:count], excluded


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
