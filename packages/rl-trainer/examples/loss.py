"""A policy loss of your own: a squared log-ratio in place of PPO's clipping."""

import torch

from rl_trainer.algorithms.losses import PolicyLoss
from rl_trainer.algorithms.losses.loss_function import LossInputs, TokenLoss
from rl_trainer.config import ActorConfig


def squared_trust_region(x):
    """-r A + (log r)^2 / 2, with r = pi / pi_old, for each token."""
    penalty = 0.5 * x.log_ratio() ** 2
    return TokenLoss(loss=penalty - x.ratio() * x.advantages, metrics={"penalty": penalty.detach()})


LOSS = PolicyLoss(squared_trust_region)


def main():
    """Two tokens of one response; the second is twice as likely as before the update."""
    old = torch.log(torch.tensor([0.5, 0.25], dtype=torch.float64))
    log_prob = torch.log(torch.tensor([0.5, 0.5], dtype=torch.float64)).requires_grad_()
    inputs = LossInputs(
        log_prob=log_prob,
        old_log_prob=old,
        advantages=torch.tensor([3.0, 1.0], dtype=torch.float64),
        mask=torch.ones(2, dtype=torch.bool),
        row=torch.zeros(2, dtype=torch.int64),
        rows=1,
        config=ActorConfig(),
    )
    result = squared_trust_region(inputs)
    (gradient,) = torch.autograd.grad(result.loss.sum(), log_prob)
    print(result.loss.tolist(), gradient.tolist())


if __name__ == "__main__":
    main()
