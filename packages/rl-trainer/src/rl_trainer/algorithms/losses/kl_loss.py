"""The KL divergence from the reference policy as a term of the loss (`ActorConfig.use_kl_loss`)."""

from __future__ import annotations

import torch

from rl_trainer.algorithms.kl import SAFE_LOG
from rl_trainer.config.kl import KL_LOSSES, kl_name

REST = 1e-6
"""Smallest probability of all tokens beyond the K most probable ones; float32 sums round to it."""


def kl_loss(log_prob: torch.Tensor, ref_log_prob: torch.Tensor, kind: str) -> torch.Tensor:
    """[T] differentiable estimate of the KL divergence per token, nats.

    `rl_trainer.algorithms.kl` defines the estimators. A name that ends in + has the estimator's
    value and the gradient of k2, which is an unbiased gradient of the KL; those of k1 and k3 are
    biased (that of k1 is 0 on average).

    Raises:
        ConfigError: unknown kind.
    """
    name = kl_name(kind, KL_LOSSES, "ActorConfig.kl_loss_type")
    d = (log_prob - ref_log_prob).clamp(-SAFE_LOG, SAFE_LOG)
    value = _estimate(d, name.removesuffix("+"))
    if not name.endswith("+"):
        return value
    half_square = 0.5 * d * d
    return value.detach() + half_square - half_square.detach()


def topk_kl(log_prob: torch.Tensor, ref_log_prob: torch.Tensor) -> torch.Tensor:
    """[T] KL(policy || reference), nats, of distributions over K tokens and the rest as one more.

    That is at most the divergence over the whole vocabulary, and equal to it if the K tokens are
    all that has a probability. A rest below REST counts as REST, without a gradient.

    Args:
        log_prob: [T, K] of the policy, with gradient.
        ref_log_prob: [T, K] of the reference.
    """
    p, q = log_prob.exp(), ref_log_prob.exp()
    rest, ref_rest = ((1 - x.sum(-1)).clamp(min=REST) for x in (p, q))
    return (p * (log_prob - ref_log_prob)).sum(-1) + rest * (rest / ref_rest).log()


def _estimate(d: torch.Tensor, name: str) -> torch.Tensor:
    if name == "k1":
        return d
    if name == "abs":
        return d.abs()
    return 0.5 * d * d if name == "k2" else torch.expm1(-d) + d
