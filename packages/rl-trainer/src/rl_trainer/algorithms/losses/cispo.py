"""CISPO: clipped importance weights instead of clipped updates."""

from __future__ import annotations

from rl_trainer.algorithms.losses.loss_function import LossInputs, TokenLoss


def cispo(x: LossInputs) -> TokenLoss:
    """CISPO (MiniMax 2025, arXiv:2506.13585, eq. 4 and 5).

    -sg(clip(r, 1 - low, 1 + high)) A log pi, where sg stops the gradient. The clip bounds the
    weight of a token's gradient; no token loses its gradient.
    """
    ratio = x.ratio().detach()
    weight = ratio.clamp(1 - x.config.clip_ratio_low, 1 + x.config.clip_ratio_high)
    return TokenLoss(loss=-weight * x.advantages * x.log_prob, metrics={"pg_clipfrac": weight != ratio})
