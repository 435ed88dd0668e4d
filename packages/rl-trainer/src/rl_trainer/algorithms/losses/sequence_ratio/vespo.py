"""VESPO: a smooth kernel of the response's ratio as the weight of its policy gradient."""

from __future__ import annotations

import math

import torch

from rl_trainer.algorithms.kl import SAFE_LOG
from rl_trainer.algorithms.losses.aggregate import row_sums
from rl_trainer.algorithms.losses.loss_function import LossInputs, TokenLoss

LOWEST = math.log(1e-8)
"""Least log-ratio of a response, so that the kernel stays above 0."""


def vespo(x: LossInputs) -> TokenLoss:
    """VESPO (Shen et al. 2026, arXiv:2602.10693): -phi(W) A log pi.

    phi(W) = W^k exp(lambda (1 - W)) has no gradient, and phi(1) = 1. W is the ratio of the whole
    response, not normalized by its length. k and lambda are policy_loss.vespo_k_pos and
    vespo_lambda_pos where A >= 0, and vespo_k_neg and vespo_lambda_neg elsewhere, as in the
    authors' code.
    """
    c, positive = x.config.policy_loss, x.advantages >= 0
    log_ratio = x.log_ratio().detach().clamp(-SAFE_LOG, SAFE_LOG)
    log_w = row_sums(log_ratio, x.mask, x.row, x.rows).clamp(LOWEST, SAFE_LOG)[x.row]
    k = torch.where(positive, log_w.new_tensor(c.vespo_k_pos), log_w.new_tensor(c.vespo_k_neg))
    rate = torch.where(positive, log_w.new_tensor(c.vespo_lambda_pos), log_w.new_tensor(c.vespo_lambda_neg))
    phi = torch.exp(k * log_w + rate * (1 - torch.exp(log_w)))
    return TokenLoss(loss=-phi * x.advantages * x.log_prob, metrics={"vespo_weight": phi})
