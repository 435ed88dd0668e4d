"""Old log-probs: of the rollout engine, of a pass of the actor, or interpolated in the loss."""

from __future__ import annotations

from operator import add

import msgspec
import numpy as np

from rl_protocol import BatchError, RaggedColumn
from rl_trainer.algorithms.advantages import ADVANTAGE_ESTIMATORS
from rl_trainer.algorithms.arrays import BoolArray, FloatArray, IntArray
from rl_trainer.config import AlgorithmConfig, RolloutCorrectionConfig

GAP = "training/rollout_log_probs_diff_mean"
"""Metric that `algorithm.old_log_prob_tolerance` bounds."""
STALENESS = "training/off_policy/trajectory_staleness_worst/max"
"""Metric, versions: age of the oldest weights that generated any of a step's tokens."""
INTERPOLATION = "interpolation"
"""Name of the column that `interpolation` makes for the update."""
SAMPLED_FRACTION = 0.05
"""Fraction of the rows that `auto` compares at most, in a step that takes the engine's."""
FULL_CHECK_PERIOD = 20
"""Steps from one in which `auto` computes the log-probs of all rows to the next; 1 is the first."""
QUARTERS = 4
"""Parts of a response by position."""


class LogProbGap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Absolute differences between rollout engine and actor, summed over unmasked tokens."""

    tokens: int = 0
    log_prob_sum: float = 0.0
    """Of log-probs, nats."""
    log_prob_max: float = 0.0
    prob_sum: float = 0.0
    """Of probabilities."""
    prob_square_sum: float = 0.0
    prob_max: float = 0.0
    quarter_tokens: tuple[int, ...] = (0,) * QUARTERS
    """Those in each quarter of the places of their responses."""
    quarter_prob_sums: tuple[float, ...] = (0.0,) * QUARTERS

    @classmethod
    def of(cls, rollout: FloatArray, actor: FloatArray, mask: BoolArray, offsets: IntArray) -> LogProbGap:
        """From the log-probs [T] of each, of responses that begin and end at `offsets` [N + 1]."""
        if not mask.any():
            return cls()
        lengths = np.diff(offsets)
        places = np.arange(len(mask)) - np.repeat(offsets[:-1], lengths)
        quarter = (places * QUARTERS // np.repeat(lengths, lengths))[mask]
        ours, theirs = actor[mask].astype(np.float64), rollout[mask].astype(np.float64)
        log_probs, probs = np.abs(theirs - ours), np.abs(np.exp(theirs) - np.exp(ours))
        return cls(
            tokens=int(mask.sum()),
            log_prob_sum=float(log_probs.sum()),
            log_prob_max=float(log_probs.max()),
            prob_sum=float(probs.sum()),
            prob_square_sum=float(np.square(probs).sum()),
            prob_max=float(probs.max()),
            quarter_tokens=tuple(np.bincount(quarter, minlength=QUARTERS).tolist()),
            quarter_prob_sums=tuple(np.bincount(quarter, probs, QUARTERS).tolist()),
        )

    def __add__(self, other: LogProbGap) -> LogProbGap:
        """Of the tokens of both."""
        return LogProbGap(
            tokens=self.tokens + other.tokens,
            log_prob_sum=self.log_prob_sum + other.log_prob_sum,
            log_prob_max=max(self.log_prob_max, other.log_prob_max),
            prob_sum=self.prob_sum + other.prob_sum,
            prob_square_sum=self.prob_square_sum + other.prob_square_sum,
            prob_max=max(self.prob_max, other.prob_max),
            quarter_tokens=tuple(map(add, self.quarter_tokens, other.quarter_tokens)),
            quarter_prob_sums=tuple(map(add, self.quarter_prob_sums, other.quarter_prob_sums)),
        )

    def metrics(self) -> dict[str, float]:
        """Mean and maximum of the differences, under verl's names, and means by position; {}
        without tokens.
        """
        if not self.tokens:
            return {}
        mean = self.prob_sum / self.tokens
        quarters = enumerate(zip(self.quarter_prob_sums, self.quarter_tokens, strict=True), 1)
        variance = (self.prob_square_sum - self.tokens * mean**2) / max(self.tokens - 1, 1)
        return {
            "training/rollout_probs_diff_mean": mean,
            "training/rollout_probs_diff_max": self.prob_max,
            "training/rollout_probs_diff_std": max(variance, 0.0) ** 0.5,
            GAP: self.log_prob_sum / self.tokens,
            "training/rollout_log_probs_diff_max": self.log_prob_max,
            **{f"training/rollout_probs_diff_quarter_{i}": total / count for i, (total, count) in quarters if count},
        }


def recompute_reason(algorithm: AlgorithmConfig) -> str:
    """The setting for which `auto` recomputes in every step; empty: it can take the engine's."""
    for one in algorithm.variants:
        if "sum_pi_squared" in ADVANTAGE_ESTIMATORS.get(one.adv_estimator).reads:
            return f"AlgorithmConfig.adv_estimator={one.adv_estimator} reads sum_pi_squared of that pass"
    if algorithm.demonstrates:
        return "AlgorithmConfig.sft_coef trains on answers of the data, which no rollout engine generated"
    if algorithm.trains_observations:
        return "AlgorithmConfig.echo_coef trains on observations, which no rollout engine generated"
    if algorithm.router_replay == "R2":
        return "AlgorithmConfig.router_replay=R2 records the experts in that pass"
    for name in ("rollout_is", "rollout_rs"):
        if getattr(algorithm.rollout_correction, name):
            return f"RolloutCorrectionConfig.{name} compares them with those of the rollout engine"
    return ""


def old_log_prob_mode(algorithm: AlgorithmConfig) -> str:
    """`AlgorithmConfig.old_log_prob`: recompute where `auto` has no choice."""
    mode = algorithm.old_log_prob
    return "recompute" if mode == "auto" and recompute_reason(algorithm) else mode


def starts_from_rollout(mode: str) -> bool:
    """Whether the old log-probs of this mode need no pass of the actor: the loss has those of the
    rollout engine, and makes the rollout correction.
    """
    return mode in ("rollout", "interpolate")


def loss_correction(algorithm: AlgorithmConfig) -> RolloutCorrectionConfig | None:
    """The rollout correction that the policy loss makes; None: the `adv` stage makes it."""
    return algorithm.rollout_correction if starts_from_rollout(algorithm.old_log_prob) else None


def interpolation(versions: RaggedColumn, trained: int) -> RaggedColumn:
    """How far each token's old log-prob lies from the rollout engine's (0) to that of the policy
    being trained (1).

    The old policy is the one a version before the trained one, and log-probs change linearly with
    the version: (trained - 1 - v) / (trained - v) of a token that version v generated, and 0 for
    v = trained (AReaL, `prox_logp_method=loglinear`).

    Args:
        versions: int [runs, 2] per row, the column `rollout_versions`.
        trained: version of the weights that the update starts from.

    Returns:
        float32 [R] per row.

    Raises:
        BatchError: a token is of a later version than the trained one.
    """
    age = trained - versions.values[:, 0].astype(np.int64)
    if (age < 0).any():
        raise BatchError(
            f"A response has tokens of version {trained - int(age.min())} of the weights, and the update trains version {trained}: "
            "only responses of this version and of earlier ones can be trained on."
        )
    tokens = versions.values[:, 1]
    values = np.repeat(np.maximum(age - 1, 0) / np.maximum(age, 1), tokens).astype(np.float32)
    ends = np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])
    return RaggedColumn(values, ends[versions.offsets], "float32")


def sampled_rows(count: int, least: int, seed: int, step: int) -> list[int]:
    """The rows of which `auto` computes log-probs in this step, in order.

    Args:
        count: rows of the step.
        least: number of data-parallel ranks, each of which needs a row.
        seed: of the run.
        step: number of the step.
    """
    size = min(max(int(count * SAMPLED_FRACTION), least), count)
    rng = np.random.default_rng((seed, step, count))
    return sorted(rng.choice(count, size, replace=False).tolist())
