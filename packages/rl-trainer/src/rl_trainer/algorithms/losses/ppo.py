"""PPO (`vanilla`): the clipped surrogate loss, with clip-higher and dual clip."""

from __future__ import annotations

import torch

from rl_trainer.algorithms.losses.loss_function import LossInputs, TokenLoss


def ppo_policy_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Clipped surrogate per token (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    Includes clip-higher (DAPO, arXiv:2503.14476) and dual clip (Ye et al. 2020, arXiv:1912.09729,
    eq. 5). With r = exp(log_prob - old_log_prob): max(-A r, -A clip(r, 1 - low, 1 + high)), and
    where A < 0 at most -A c.

    Returns:
        loss [T], clipped [T] (bool: the clip took effect), clipped_lower [T] (bool: the dual clip
        did).
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
    """`ppo_policy_loss` with the clip ranges of the configuration."""
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
