"""Policy losses that look at each token by itself. r = pi / pi_old of the token, A its advantage, sg(x): no gradient through x.

`clip_ratio_low`, `clip_ratio_high`, `clip_ratio_c`, `tau_*` and `policy_loss.*` are the settings under `actor`.
"""

from __future__ import annotations

import torch

from rl_trainer.algorithms.losses.base import LossInputs, TokenLoss


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


def vanilla(x: LossInputs) -> TokenLoss:
    """PPO; see `ppo_policy_loss`."""
    c = x.config
    loss, clipped, lower = ppo_policy_loss(
        x.log_prob,
        x.old_log_prob,
        x.advantages,
        clip_low=c.clip_ratio_low,
        clip_high=c.clip_ratio_high,
        clip_c=c.clip_ratio_c,
    )
    return TokenLoss(loss=loss, metrics={"pg_clipfrac": clipped, "pg_clipfrac_lower": lower})


def gpg(x: LossInputs) -> TokenLoss:
    """Plain policy gradient, -A log pi (GPG, Chu et al. 2025, arXiv:2504.02546, eq. 5): REINFORCE with whatever advantage was chosen."""
    return TokenLoss(loss=-x.advantages * x.log_prob)


def cispo(x: LossInputs) -> TokenLoss:
    """CISPO (MiniMax 2025, arXiv:2506.13585, eq. 4 and 5): -sg(clip(r, 1 - low, 1 + high)) A log pi. The clip bounds the weight of a token's
    gradient; no token loses its gradient."""
    ratio = x.ratio().detach()
    weight = ratio.clamp(1 - x.config.clip_ratio_low, 1 + x.config.clip_ratio_high)
    return TokenLoss(loss=-weight * x.advantages * x.log_prob, metrics={"pg_clipfrac": weight != ratio})


def sapo(x: LossInputs) -> TokenLoss:
    """SAPO (Gao et al. 2025, arXiv:2511.20347): -A (4 / tau) sigmoid(tau (r - 1)), tau_pos where A > 0 and tau_neg elsewhere.

    The gradient at r = 1 is the policy gradient and fades smoothly with the distance from there. The paper averages by seq-mean-token-mean.
    """
    tau = _by_sign(x.advantages, x.config.tau_pos, x.config.tau_neg)
    gate = torch.sigmoid(tau * (x.ratio() - 1.0)) * (4.0 / tau)
    return TokenLoss(loss=-x.advantages * gate)


def clip_cov(x: LossInputs) -> TokenLoss:
    """Clip-Cov (Cui et al. 2025, arXiv:2505.22617): PPO without dual clip; the tokens chosen by `covariance.clip_cov_tokens` get neither
    loss nor gradient."""
    low, high, chosen, ratio = x.config.clip_ratio_low, x.config.clip_ratio_high, x.choice(), x.ratio()
    loss = torch.maximum(-x.advantages * ratio, -x.advantages * ratio.clamp(1 - low, 1 + high))
    return TokenLoss(loss=torch.where(chosen, torch.zeros_like(loss), loss), metrics={"pg_clipfrac": chosen})


def kl_cov(x: LossInputs) -> TokenLoss:
    """KL-Cov (Cui et al. 2025, arXiv:2505.22617): -A r without any clip; the tokens chosen by `covariance.kl_cov_tokens` pay
    policy_loss.ppo_kl_coef * |log r| for leaving the old policy (as in the authors' code)."""
    chosen, coef = x.choice(), x.config.policy_loss.ppo_kl_coef
    price = torch.where(chosen, coef * x.log_ratio().abs(), torch.zeros_like(x.log_prob))
    return TokenLoss(loss=-x.advantages * x.ratio() + price, metrics={"kl_cov_fraction": chosen})


def dppo_tv(x: LossInputs) -> TokenLoss:
    """DPPO with binary total variation (Qi et al. 2026, arXiv:2602.04879): -sg(min(r, c)) A log pi, only for tokens whose update does not move
    pi further than the trust region: pi - pi_old <= clip_ratio_high where A > 0, >= -clip_ratio_low elsewhere (probabilities, not ratios)."""
    moved = (x.log_prob.exp() - x.old_log_prob.exp()).detach()
    inside = torch.where(x.advantages > 0, moved <= x.config.clip_ratio_high, moved >= -x.config.clip_ratio_low)
    return _trust_region(x, inside)


def dppo_kl(x: LossInputs) -> TokenLoss:
    """DPPO with binary KL (Qi et al. 2026, arXiv:2602.04879): as `dppo_tv`, but the token leaves the trust region when
    p log(p / q) + (1 - p) log((1 - p) / (1 - q)), with p = pi_old and q = pi, exceeds clip_ratio_high (A > 0) or clip_ratio_low (nats) and
    the update would move pi further away from pi_old."""
    new, old = x.log_prob.detach(), x.old_log_prob
    divergence = old.exp() * (old - new) + (1 - old.exp()) * (_log_rest(old) - _log_rest(new))
    limit = _by_sign(x.advantages, x.config.clip_ratio_high, x.config.clip_ratio_low)
    back = torch.where(x.advantages > 0, new <= old, new >= old)
    return _trust_region(x, (divergence <= limit) | back)


def _by_sign(advantages: torch.Tensor, positive: float, other: float) -> torch.Tensor:
    """[T] in the element type of the advantages."""
    return torch.where(advantages > 0, advantages.new_tensor(positive), advantages.new_tensor(other))


def _log_rest(log_p: torch.Tensor) -> torch.Tensor:
    """log(1 - p) for p up to 1 - 1e-8."""
    return torch.log(-torch.expm1(log_p.clamp(max=-1e-8)))


def _trust_region(x: LossInputs, inside: torch.Tensor) -> TokenLoss:
    ratio = x.ratio().detach()
    weight = ratio.clamp(max=x.config.clip_ratio_c)
    loss = torch.where(inside, -weight * x.advantages * x.log_prob, torch.zeros_like(x.log_prob))
    return TokenLoss(loss=loss, metrics={"pg_clipfrac": ~inside, "pg_clipfrac_lower": inside & (ratio > weight)})
