"""What is read off logits and values."""

from __future__ import annotations

import torch


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, cliprange: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped value loss per token (as in OpenAI's ppo2): max of the squared errors of V and of V kept within `cliprange` of the old V, halved.

    Returns:
        loss [T], clipped [T] (bool: the clip decided).
    """
    move = values - old_values
    bounded = old_values + move.clamp(-cliprange, cliprange)
    plain_error, bounded_error = (values - returns) ** 2, (bounded - returns) ** 2
    outside = move.abs() > cliprange  # within, the two errors differ by rounding alone
    return 0.5 * torch.maximum(plain_error, bounded_error), outside & (bounded_error > plain_error)


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
    log_p = torch.log_softmax(_scaled(logits, temperature), dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, tokens[:, None]).squeeze(-1), entropy


def sum_pi_squared(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """[T] sum over the vocabulary of squared probabilities of softmax(logits / temperature), logits [T, V], float32."""
    return torch.softmax(_scaled(logits, temperature), dim=-1).square().sum(-1)


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """float32; at temperature 1 nothing as large as the logits is copied."""
    return logits.float() if temperature == 1.0 else logits.float() / temperature
