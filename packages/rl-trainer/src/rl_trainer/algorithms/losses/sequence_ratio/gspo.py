"""GSPO: PPO with one ratio per sequence."""

from __future__ import annotations

import torch

from rl_trainer.algorithms.kl import SAFE_LOG
from rl_trainer.algorithms.losses.aggregate import row_means
from rl_trainer.algorithms.losses.loss_function import LossInputs, TokenLoss


def gspo(x: LossInputs) -> TokenLoss:
    """GSPO (Zheng et al. 2025, arXiv:2507.18071, eq. 5 to 7).

    In the token form of eq. 13, which also takes advantages per token. s = exp(mean_t log r) is the
    ratio of the trajectory, with the mean over its unmasked tokens; per token s_t = sg(s) pi /
    sg(pi), where sg stops the gradient, and the loss is max(-A s_t, -A clip(s_t, 1 - low, 1 +
    high)). If all advantages of a trajectory are equal, the gradient is that of s itself. The paper
    uses loss_agg_mode=seq-mean-token-mean and a clip range of about 1e-4.
    """
    log_s = row_means(x.log_ratio().detach(), x.mask, x.row, x.rows).clamp(-SAFE_LOG, SAFE_LOG)
    s = torch.exp(log_s[x.row] + x.log_prob - x.log_prob.detach())
    plain = -x.advantages * s
    bounded = -x.advantages * s.clamp(1 - x.config.clip_ratio_low, 1 + x.config.clip_ratio_high)
    return TokenLoss(loss=torch.maximum(plain, bounded), metrics={"pg_clipfrac": bounded > plain})
