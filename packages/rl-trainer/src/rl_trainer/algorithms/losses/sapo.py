"""SAPO: a smooth gate instead of the clip."""

from __future__ import annotations

import torch

from rl_trainer.algorithms.losses.loss_function import LossInputs, TokenLoss


def sapo(x: LossInputs) -> TokenLoss:
    """SAPO (Gao et al. 2025, arXiv:2511.20347): -A (4 / tau) sigmoid(tau (r - 1)).

    tau is `tau_pos` where A > 0 and `tau_neg` elsewhere. At r = 1 the gradient is the policy
    gradient; it decreases smoothly as r moves away from 1. The paper uses
    loss_agg_mode=seq-mean-token-mean.
    """
    tau = x.by_sign(x.config.tau_pos, x.config.tau_neg)
    gate = torch.sigmoid(tau * (x.ratio() - 1.0)) * (4.0 / tau)
    return TokenLoss(loss=-x.advantages * gate)
