"""Which tokens drive the policy's entropy down (Cui et al. 2025, arXiv:2505.22617): those whose log-prob and advantage rise together.

The choice is made once per step, over all tokens of the batch and from the log-probs before the update, which are the policy's own at the
first optimizer step. So neither micro-batches, nor ranks, nor the order of rows change it. M tokens, in canonical order (see `episodes`).
"""

from __future__ import annotations

import numpy as np

from rl_trainer.algorithms.episodes import BoolArray, FloatArray


def centred_products(advantages: FloatArray, log_probs: FloatArray) -> FloatArray:
    """[M] (A - mean A) (log pi - mean log pi): the token's part of the covariance (eq. 10)."""
    if not advantages.size:
        return np.zeros(0)
    return (advantages - advantages.mean()) * (log_probs - log_probs.mean())


def clip_cov_tokens(
    advantages: FloatArray, log_probs: FloatArray, *, ratio: float, low: float, high: float, rng: np.random.Generator
) -> BoolArray:
    """Clip-Cov: of the tokens whose product lies between `low` and `high`, a random `ratio` of all M, at least one."""
    products = centred_products(advantages, log_probs)
    candidates = np.flatnonzero((products > low) & (products < high))
    chosen = np.zeros(advantages.size, np.bool_)
    if candidates.size:
        wanted = min(max(int(ratio * advantages.size), 1), candidates.size)
        chosen[rng.choice(candidates, wanted, replace=False)] = True
    return chosen


def kl_cov_tokens(advantages: FloatArray, log_probs: FloatArray, *, ratio: float) -> BoolArray:
    """KL-Cov: the `ratio` of all M tokens with the largest product, at least one."""
    chosen = np.zeros(advantages.size, np.bool_)
    order = np.argsort(-centred_products(advantages, log_probs), kind="stable")
    chosen[order[: max(int(ratio * advantages.size), 1)]] = True
    return chosen
