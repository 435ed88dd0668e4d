"""TOPR: importance weights for responses with a negative advantage only."""

from __future__ import annotations

import torch

from rl_trainer.algorithms.losses.aggregate import row_sums
from rl_trainer.algorithms.losses.loss_function import LossInputs, TokenLoss


def topr(x: LossInputs) -> TokenLoss:
    """TOPR (Le Roux et al. 2025, arXiv:2503.14286, eq. 8): -w A log pi.

    w is 1 where A >= 0, and min(r(y), 1) elsewhere, without gradient, where r(y) is the ratio of
    the whole response. So a response that has become unlikely is not pushed down further. The
    paper's reward R, whose sign decides, is here the advantage: the reward minus a baseline.
    """
    log_ratio = row_sums(x.log_ratio().detach(), x.mask, x.row, x.rows)[x.row]
    tapered = torch.exp(log_ratio.clamp(max=0.0))
    negative = x.advantages < 0
    weight = torch.where(negative, tapered, torch.ones_like(tapered))
    return TokenLoss(loss=-weight * x.advantages * x.log_prob, metrics={"pg_clipfrac": negative & (log_ratio > 0)})
