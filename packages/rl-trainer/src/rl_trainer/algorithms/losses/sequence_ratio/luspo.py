"""LUSPO: GSPO without its preference for short responses."""

from __future__ import annotations

from rl_trainer.algorithms.losses.aggregate import masked_counts
from rl_trainer.algorithms.losses.loss_function import LossInputs, TokenLoss
from rl_trainer.algorithms.losses.sequence_ratio.gspo import gspo


def luspo(x: LossInputs) -> TokenLoss:
    """LUSPO (Liu et al. 2026, arXiv:2602.05261): the GSPO loss of a response times its length.

    The length is the number of unmasked tokens. Every token carries the loss of its trajectory, so
    loss_agg_mode must be seq-mean-token-mean. Clip ranges are as small as those of GSPO.
    """
    out = gspo(x)
    return TokenLoss(loss=out.loss * masked_counts(x.mask, x.row, x.rows)[x.row], metrics=out.metrics)
