"""The divergence from the reference policy as a part of the loss."""

from __future__ import annotations

import torch

from rl_trainer.algorithms.kl import KL_LOSSES, SAFE_LOG, kl_name


def kl_loss(log_prob: torch.Tensor, ref_log_prob: torch.Tensor, kind: str) -> torch.Tensor:
    """[T] differentiable per-token divergence from the reference policy, nats; see `rl_trainer.algorithms.kl` for the estimators.

    A + behind the name keeps the estimator's value and takes the gradient of k2, which is an unbiased one of the KL: the gradients of k1 and k3
    are not (that of k1 is 0 on average).

    Raises:
        ConfigError: unknown kind.
    """
    name = kl_name(kind, KL_LOSSES, "actor.kl_loss_type")
    d = (log_prob - ref_log_prob).clamp(-SAFE_LOG, SAFE_LOG)
    value = _estimate(d, name.removesuffix("+"))
    if not name.endswith("+"):
        return value
    half_square = 0.5 * d * d
    return value.detach() + half_square - half_square.detach()


def _estimate(d: torch.Tensor, name: str) -> torch.Tensor:
    if name == "k1":
        return d
    if name == "abs":
        return d.abs()
    return 0.5 * d * d if name == "k2" else torch.expm1(-d) + d


def full_kl(logits: torch.Tensor, ref_logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """[T] exact KL(policy || reference) of each next-token distribution, nats, differentiable.

    Args:
        logits, ref_logits: [T, V].
        temperature: divides both.
    """
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    log_q = torch.log_softmax(ref_logits.float() / temperature, dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)
