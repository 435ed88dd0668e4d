"""Log-probs, entropies and exact KL divergences of logits, in torch. T tokens, vocabulary V."""

from __future__ import annotations

import torch


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
