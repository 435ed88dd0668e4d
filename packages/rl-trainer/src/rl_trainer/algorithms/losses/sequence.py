"""Policy losses whose ratio belongs to the whole trajectory. The mean over its unmasked tokens is written mean_t."""

from __future__ import annotations

import torch

from rl_trainer.algorithms.kl import SAFE_LOG
from rl_trainer.algorithms.losses.aggregate import row_means
from rl_trainer.algorithms.losses.base import LossInputs, TokenLoss


def gspo(x: LossInputs) -> TokenLoss:
    """GSPO (Zheng et al. 2025, arXiv:2507.18071, eq. 5 to 7; in the token form of eq. 13, which also takes advantages per token).

    s = exp(mean_t log r), and per token s_t = sg(s) pi / sg(pi): max(-A s_t, -A clip(s_t, 1 - low, 1 + high)). With equal advantages in a
    trajectory the gradient is that of s itself. The paper's average is seq-mean-token-mean, its clip range some 1e-4.
    """
    log_s = row_means(x.log_ratio().detach(), x.mask, x.row, x.rows).clamp(-SAFE_LOG, SAFE_LOG)
    s = torch.exp(log_s[x.row] + x.log_prob - x.log_prob.detach())
    plain = -x.advantages * s
    bounded = -x.advantages * s.clamp(1 - x.config.clip_ratio_low, 1 + x.config.clip_ratio_high)
    return TokenLoss(loss=torch.maximum(plain, bounded), metrics={"pg_clipfrac": bounded > plain})


def geo_mean(x: LossInputs) -> TokenLoss:
    """GMPO (Zhao et al. 2025, arXiv:2507.20673): -A exp(mean_t of the clipped log r), the geometric mean of the clipped ratios.

    Each token's log r is clipped to [-low, high] where that makes the objective smaller: from above where A > 0, from below where A < 0 (ranges
    in log space; the paper takes 0.4 for both). A is the trajectory's mean advantage. Every token carries the trajectory's loss, so it
    must be averaged by seq-mean-token-mean.
    """
    log_ratio = x.log_ratio()
    bounded = log_ratio.clamp(-x.config.clip_ratio_low, x.config.clip_ratio_high)
    sign = torch.sign(x.advantages)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * bounded)
    ratio = torch.exp(row_means(pessimistic, x.mask, x.row, x.rows).clamp(-SAFE_LOG, SAFE_LOG))
    loss = -row_means(x.advantages, x.mask, x.row, x.rows) * ratio
    clipped = bounded != log_ratio
    metrics = {"pg_clipfrac": clipped & (x.advantages > 0), "pg_clipfrac_lower": clipped & (x.advantages < 0)}
    return TokenLoss(loss=loss[x.row], metrics=metrics)
