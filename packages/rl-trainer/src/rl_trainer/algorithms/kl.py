"""KL divergence from the reference policy in the reward: estimators, and the adaptive coefficient.

With d = log pi(token) - log ref(token), the token sampled from pi (Schulman 2020, "Approximating KL
divergence"):

    k1   d                  unbiased
    abs  |d|
    k2   d^2 / 2            its gradient is that of the KL
    k3   exp(-d) - 1 + d    unbiased, never negative
"""

from __future__ import annotations

import numpy as np

from rl_trainer.algorithms.arrays import FloatArray
from rl_trainer.config.kl import KL_PENALTIES, kl_name

SAFE_LOG = 20.0
"""Log-ratios are clamped to +- this value before they are exponentiated."""


def kl_penalty(log_prob: FloatArray, ref_log_prob: FloatArray, kind: str) -> FloatArray:
    """[T] estimate per token, nats. `kind` is one of KL_PENALTIES or an alias.

    Raises:
        ConfigError: unknown kind.
    """
    d = np.clip(log_prob - ref_log_prob, -SAFE_LOG, SAFE_LOG)
    name = kl_name(kind, KL_PENALTIES, "AlgorithmConfig.kl_penalty")
    if name == "k1":
        return d
    if name == "abs":
        return np.abs(d)
    return 0.5 * d * d if name == "k2" else np.expm1(-d) + d


def adaptive_kl_coef(coef: float, kl: float, *, target: float, horizon: float, sequences: int) -> float:
    """The KL coefficient of the next step (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    It increases while the measured divergence is above `target` (nats per token) and decreases
    while it is below, by at most 20 % per `horizon` sequences.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * sequences / horizon)
