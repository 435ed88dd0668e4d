"""GMPO (`geo_mean`): the geometric mean of the clipped token ratios of a trajectory."""

from __future__ import annotations

import torch

from rl_trainer.algorithms.kl import SAFE_LOG
from rl_trainer.algorithms.losses.aggregate import row_means
from rl_trainer.algorithms.losses.loss_function import LossInputs, TokenLoss


def geo_mean(x: LossInputs) -> TokenLoss:
    """GMPO (Zhao et al. 2025, arXiv:2507.20673): -A exp(mean_t of the clipped log r).

    A token's log r is clipped to [-low, high] where that lowers the objective: from above where A >
    0, from below where A < 0. The ranges are in log space; the paper uses 0.4 for both. A is the
    mean advantage of the trajectory. Every token carries the loss of its trajectory, so
    loss_agg_mode must be seq-mean-token-mean.
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
