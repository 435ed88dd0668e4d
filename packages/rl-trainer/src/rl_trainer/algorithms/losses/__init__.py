"""Losses in torch, over flat response tokens: T tokens of R trajectories, `row` int64 [T] says which trajectory a token belongs to."""

from rl_trainer.algorithms.losses.aggregate import BatchCounts, aggregate, masked_counts
from rl_trainer.algorithms.losses.base import LossFunction, LossInputs, TokenLoss
from rl_trainer.algorithms.losses.kl import full_kl, kl_loss
from rl_trainer.algorithms.losses.objective import PolicyObjective, TokenColumns
from rl_trainer.algorithms.losses.readout import sum_pi_squared, token_log_probs, value_loss
from rl_trainer.algorithms.losses.sequence import geo_mean, gspo
from rl_trainer.algorithms.losses.tokenwise import (
    cispo,
    clip_cov,
    dppo_kl,
    dppo_tv,
    gpg,
    kl_cov,
    ppo_policy_loss,
    sapo,
    vanilla,
)
from rl_trainer.algorithms.losses.values import ValueColumns, ValueObjective, value_fit

__all__ = [
    "BatchCounts",
    "LossFunction",
    "LossInputs",
    "PolicyObjective",
    "TokenColumns",
    "TokenLoss",
    "ValueColumns",
    "ValueObjective",
    "aggregate",
    "cispo",
    "clip_cov",
    "dppo_kl",
    "dppo_tv",
    "full_kl",
    "geo_mean",
    "gpg",
    "gspo",
    "kl_cov",
    "kl_loss",
    "masked_counts",
    "ppo_policy_loss",
    "sapo",
    "sum_pi_squared",
    "token_log_probs",
    "value_fit",
    "value_loss",
    "vanilla",
]
