"""Clip-Cov: PPO that drops the loss of tokens that reduce entropy most."""

from __future__ import annotations

import torch

from rl_trainer.algorithms.losses.loss_function import LossInputs, TokenLoss


def clip_cov(x: LossInputs) -> TokenLoss:
    """Clip-Cov (Cui et al. 2025, arXiv:2505.22617): PPO without dual clip.

    Chosen tokens get neither loss nor gradient; `rl_trainer.algorithms.covariance_tokens` selects
    them.
    """
    low, high, chosen, ratio = x.config.clip_ratio_low, x.config.clip_ratio_high, x.require_chosen(), x.ratio()
    loss = torch.maximum(-x.advantages * ratio, -x.advantages * ratio.clamp(1 - low, 1 + high))
    return TokenLoss(loss=torch.where(chosen, torch.zeros_like(loss), loss), metrics={"pg_clipfrac": chosen})
