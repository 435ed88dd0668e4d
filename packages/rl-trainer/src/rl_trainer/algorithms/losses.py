"""Losses over flat response tokens, in torch. T tokens; `row` int64 [T] says which trajectory a token belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_protocol import ConfigError


@dataclass(frozen=True, kw_only=True)
class BatchCounts:
    """Sizes of the whole mini-batch, over all micro-batches and ranks: losses are normalised by them, so that no split changes a result."""

    tokens: int
    """Unmasked response tokens."""
    sequences: int
    """Trajectories with at least one unmasked token."""


def masked_counts(mask: torch.Tensor, row: torch.Tensor, rows: int) -> torch.Tensor:
    """Unmasked tokens of each of `rows` trajectories, float [rows]."""
    return torch.zeros(rows, dtype=torch.float32, device=mask.device).index_add_(0, row, mask.float())


def aggregate(
    loss: torch.Tensor, mask: torch.Tensor, row: torch.Tensor, rows: int, counts: BatchCounts, mode: str
) -> torch.Tensor:
    """This micro-batch's share of the mini-batch loss; the shares of all micro-batches sum to it.

    token-mean: sum over tokens / all tokens. token-sum: sum over tokens. seq-mean-token-sum: mean over trajectories of token sums.
    seq-mean-token-mean: mean over trajectories of token means.

    Args:
        loss: [T] per token.
        mask: bool [T].
        row: int64 [T] trajectory of each token, 0..rows-1.
        rows: trajectories in this micro-batch.
        counts: sizes of the whole mini-batch.
        mode: see above.
    """
    kept = torch.where(mask, loss, torch.zeros_like(loss))
    if mode == "token-mean":
        return kept.sum() / max(counts.tokens, 1)
    if mode == "token-sum":
        return kept.sum()
    sums = torch.zeros(rows, dtype=loss.dtype, device=loss.device).index_add_(0, row, kept)
    if mode == "seq-mean-token-sum":
        return sums.sum() / max(counts.sequences, 1)
    if mode == "seq-mean-token-mean":
        return (sums / masked_counts(mask, row, rows).clamp(min=1)).sum() / max(counts.sequences, 1)
    raise ConfigError(
        f"Unknown loss_agg_mode {mode!r}; known are token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean."
    )


def ppo_policy_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Clipped surrogate per token (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with clip-higher (DAPO, arXiv:2503.14476) and dual clip
    (Ye et al. 2020, arXiv:1912.09729, eq. 5).

    With r = exp(log_prob - old_log_prob): max(-A r, -A clip(r, 1 - low, 1 + high)), and where A < 0 at most -A c.

    Returns:
        loss [T], clipped [T] (bool: the clip decided), clipped_lower [T] (bool: the dual clip decided).
    """
    ratio = torch.exp((log_prob - old_log_prob).clamp(-20.0, 20.0))
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.maximum(plain, bounded)
    floor = -advantages * clip_c
    negative = advantages < 0
    loss = torch.where(negative, torch.minimum(surrogate, floor), surrogate)
    return loss, bounded > plain, negative & (surrogate > floor)


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, cliprange: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped value loss per token (as in OpenAI's ppo2): max of the squared errors of V and of V kept within `cliprange` of the old V, halved.

    Returns:
        loss [T], clipped [T] (bool: the clip decided).
    """
    bounded = old_values + (values - old_values).clamp(-cliprange, cliprange)
    plain_error, bounded_error = (values - returns) ** 2, (bounded - returns) ** 2
    return 0.5 * torch.maximum(plain_error, bounded_error), bounded_error > plain_error


def kl_loss(log_prob: torch.Tensor, ref_log_prob: torch.Tensor, kind: str) -> torch.Tensor:
    """Differentiable per-token divergence from the reference policy; see advantages.kl_penalty for the estimators."""
    d = log_prob - ref_log_prob
    if kind == "k1":
        return d
    if kind == "abs":
        return d.abs()
    if kind == "k2":
        return 0.5 * d * d
    if kind == "k3":
        d = d.clamp(-20.0, 20.0)
        return torch.exp(-d) - 1 + d
    raise ConfigError(f"Unknown KL estimator {kind!r}; known are k1, k2, k3, abs.")


def token_log_probs(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each token and entropy of each distribution, in nats, of softmax(logits / temperature).

    Args:
        logits: [T, V].
        tokens: int64 [T].
        temperature: > 0.

    Returns:
        log_probs [T], entropy [T], float32.
    """
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, tokens[:, None]).squeeze(-1), entropy
