"""Selection of the tokens that Clip-Cov and KL-Cov treat differently, by covariance.

Tokens whose log-prob and advantage are both above their means reduce the policy's entropy most (Cui
et al. 2025, arXiv:2505.22617). The selection is made once per step, over all tokens of the batch
and from the log-probs before the update, so it does not depend on micro-batches, ranks or the order
of rows. M tokens, in the order of `rl_trainer.algorithms.advantages.episodes`.
"""

from __future__ import annotations

import numpy as np

from rl_trainer.algorithms.arrays import BoolArray, FloatArray


def covariance_terms(advantages: FloatArray, log_probs: FloatArray) -> FloatArray:
    """[M] (A - mean A) (log pi - mean log pi): each token's term of the covariance (eq. 10)."""
    if not advantages.size:
        return np.zeros(0)
    return (advantages - advantages.mean()) * (log_probs - log_probs.mean())


def clip_cov_tokens(
    advantages: FloatArray, log_probs: FloatArray, *, ratio: float, low: float, high: float, rng: np.random.Generator
) -> BoolArray:
    """Tokens for Clip-Cov: a random `ratio` of all M, at least one, with a term in (low, high)."""
    terms = covariance_terms(advantages, log_probs)
    candidates = np.flatnonzero((terms > low) & (terms < high))
    chosen = np.zeros(advantages.size, np.bool_)
    if candidates.size:
        wanted = min(max(int(ratio * advantages.size), 1), candidates.size)
        chosen[rng.choice(candidates, wanted, replace=False)] = True
    return chosen


def kl_cov_tokens(advantages: FloatArray, log_probs: FloatArray, *, ratio: float) -> BoolArray:
    """Tokens for KL-Cov: the `ratio` of all M with the largest terms, at least one."""
    chosen = np.zeros(advantages.size, np.bool_)
    order = np.argsort(-covariance_terms(advantages, log_probs), kind="stable")
    chosen[order[: max(int(ratio * advantages.size), 1)]] = True
    return chosen
