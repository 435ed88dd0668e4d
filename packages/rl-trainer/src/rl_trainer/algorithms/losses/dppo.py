"""DPPO: a trust region on the token's probability, measured by total variation or by KL."""

from __future__ import annotations

import torch

from rl_trainer.algorithms.losses.loss_function import LossInputs, TokenLoss


def dppo_tv(x: LossInputs) -> TokenLoss:
    """DPPO with binary total variation (Qi et al. 2026, arXiv:2602.04879): -sg(min(r, c)) A log pi.

    sg stops the gradient. Only tokens within the trust region have a loss: pi - pi_old <=
    clip_ratio_high where A > 0, and pi - pi_old >= -clip_ratio_low elsewhere (probabilities, not
    ratios).
    """
    moved = (x.log_prob.exp() - x.old_log_prob.exp()).detach()
    inside = torch.where(x.advantages > 0, moved <= x.config.clip_ratio_high, moved >= -x.config.clip_ratio_low)
    return _trust_region(x, inside)


def dppo_kl(x: LossInputs) -> TokenLoss:
    """DPPO with binary KL (same paper): as `dppo_tv`, with the KL divergence as measure.

    A token is outside the trust region when the update would move pi further away from pi_old and p
    log(p / q) + (1 - p) log((1 - p) / (1 - q)), with p = pi_old and q = pi, exceeds clip_ratio_high
    (A > 0) or clip_ratio_low, in nats.
    """
    new, old = x.log_prob.detach(), x.old_log_prob
    divergence = old.exp() * (old - new) + (1 - old.exp()) * (_log_rest(old) - _log_rest(new))
    limit = x.by_sign(x.config.clip_ratio_high, x.config.clip_ratio_low)
    back = torch.where(x.advantages > 0, new <= old, new >= old)
    return _trust_region(x, (divergence <= limit) | back)


def _log_rest(log_p: torch.Tensor) -> torch.Tensor:
    """log(1 - p) for p up to 1 - 1e-8."""
    return torch.log(-torch.expm1(log_p.clamp(max=-1e-8)))


def _trust_region(x: LossInputs, inside: torch.Tensor) -> TokenLoss:
    ratio = x.ratio().detach()
    weight = ratio.clamp(max=x.config.clip_ratio_c)
    loss = torch.where(inside, -weight * x.advantages * x.log_prob, torch.zeros_like(x.log_prob))
    return TokenLoss(loss=loss, metrics={"pg_clipfrac": ~inside, "pg_clipfrac_lower": inside & (ratio > weight)})
