"""GPG: the plain policy gradient (REINFORCE), without ratio or clip."""

from __future__ import annotations

from rl_trainer.algorithms.losses.loss_function import LossInputs, TokenLoss


def gpg(x: LossInputs) -> TokenLoss:
    """GPG (Chu et al. 2025, arXiv:2504.02546, eq. 5): -A log pi, with any advantage estimator."""
    return TokenLoss(loss=-x.advantages * x.log_prob)
