"""DRO: the policy gradient with a quadratic penalty on the log-ratio instead of a clip."""

from __future__ import annotations

from rl_trainer.algorithms.losses.loss_function import LossInputs, TokenLoss


def dro(x: LossInputs) -> TokenLoss:
    """DRO (Richemond et al. 2024, arXiv:2405.19107) per token, as verl's `dro`.

    -A log pi + beta / 2 (log r)^2, with beta = policy_loss.dro_beta. The penalty pulls pi back to
    pi_old at every token, also where A = 0.
    """
    beta, log_ratio = x.config.policy_loss.dro_beta, x.log_ratio()
    penalty = 0.5 * beta * log_ratio**2
    return TokenLoss(loss=-x.advantages * x.log_prob + penalty, metrics={"dro_penalty": penalty})
