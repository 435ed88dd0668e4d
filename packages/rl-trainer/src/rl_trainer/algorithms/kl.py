"""The divergence of the policy from its reference, estimated from sampled tokens: names, numpy values, and the coefficient's controller.

With d = log pi(token) - log ref(token), the token drawn from pi (Schulman 2020, "Approximating KL divergence"):
k1 = d (unbiased);  abs = |d|;  k2 = d^2 / 2 (its gradient is that of the KL);  k3 = exp(-d) - 1 + d (unbiased, never negative).
"""

from __future__ import annotations

import numpy as np

from rl_protocol import ConfigError
from rl_trainer.algorithms.episodes import FloatArray
from rl_trainer.algorithms.registry import nearest

KL_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
"""verl's other names."""
KL_PENALTIES = ("k1", "k2", "k3", "abs")
"""What a reward may be reduced by."""
KL_LOSSES = (*KL_PENALTIES, *(f"{kind}+" for kind in KL_PENALTIES))
"""What a loss may hold; with + the value is the estimator's, the gradient that of k2 (straight-through)."""
SAFE_LOG = 20.0
"""Log-ratios are held within +- this before they are exponentiated."""


def kl_name(name: str, known: tuple[str, ...], key: str) -> str:
    """The estimator's own name, from it or from verl's.

    Raises:
        ConfigError: not one of `known`.
    """
    stem, plus = name.removesuffix("+"), "+" if name.endswith("+") else ""
    found = KL_ALIASES.get(stem, stem) + plus
    if found in known:
        return found
    why = " The full divergence needs the logits of both policies, which do not travel." if stem == "full" else ""
    raise ConfigError(
        f"{key} must be one of {', '.join(known)}; got {name!r}.{why or nearest(name, (*known, *KL_ALIASES))}"
    )


def kl_penalty(log_prob: FloatArray, ref_log_prob: FloatArray, kind: str) -> FloatArray:
    """[T] per-token estimate, nats. `kind` is one of KL_PENALTIES or an alias.

    Raises:
        ConfigError: unknown kind.
    """
    d = np.clip(log_prob - ref_log_prob, -SAFE_LOG, SAFE_LOG)
    name = kl_name(kind, KL_PENALTIES, "algorithm.kl_penalty")
    if name == "k1":
        return d
    if name == "abs":
        return np.abs(d)
    return 0.5 * d * d if name == "k2" else np.expm1(-d) + d


def adaptive_kl_coef(coef: float, kl: float, *, target: float, horizon: float, sequences: int) -> float:
    """The coefficient of the next step (Ziegler et al. 2019, arXiv:1909.08593, section 2.2): it grows while the measured divergence is above
    `target` (nats per token), by at most 20 % per `horizon` sequences."""
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * sequences / horizon)
