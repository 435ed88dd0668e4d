"""KL-Cov: policy gradient with a KL penalty on the tokens that reduce entropy most."""

from __future__ import annotations

import torch

from rl_trainer.algorithms.losses.loss_function import LossInputs, TokenLoss


def kl_cov(x: LossInputs) -> TokenLoss:
    """KL-Cov (Cui et al. 2025, arXiv:2505.22617): -A r without a clip.

    The chosen tokens, which `rl_trainer.algorithms.covariance_tokens` selects, add
    policy_loss.ppo_kl_coef * |log r|, as in the authors' code.
    """
    chosen, coef = x.require_chosen(), x.config.policy_loss.ppo_kl_coef
    penalty = torch.where(chosen, coef * x.log_ratio().abs(), torch.zeros_like(x.log_prob))
    return TokenLoss(loss=-x.advantages * x.ratio() + penalty, metrics={"kl_cov_fraction": chosen})
