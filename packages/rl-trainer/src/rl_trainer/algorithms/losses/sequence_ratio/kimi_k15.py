"""Kimi k1.5: policy mirror descent, with a squared log-ratio of the whole response."""

from __future__ import annotations

from rl_trainer.algorithms.losses.aggregate import row_sums
from rl_trainer.algorithms.losses.loss_function import LossInputs, TokenLoss


def kimi_k15(x: LossInputs) -> TokenLoss:
    """Kimi k1.5 (Kimi Team 2025, arXiv:2501.12599, eq. 3): -A log pi(y) + tau / 2 (log r(y))^2.

    pi(y) and r(y) are those of the whole response, sums of logarithms over its unmasked tokens, and
    tau = policy_loss.kimi_tau. The paper's advantage is the score minus the mean of its group
    (adv_estimator=dr_grpo). Every token carries the loss of its trajectory, so loss_agg_mode must
    be seq-mean-token-mean. `dro` has the same penalty for each token alone.
    """
    gain = row_sums(x.advantages * x.log_prob, x.mask, x.row, x.rows)
    penalty = 0.5 * x.config.policy_loss.kimi_tau * row_sums(x.log_ratio(), x.mask, x.row, x.rows) ** 2
    return TokenLoss(loss=(penalty - gain)[x.row], metrics={"kimi_penalty": penalty[x.row]})
