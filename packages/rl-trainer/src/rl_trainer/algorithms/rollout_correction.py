"""Corrections for a rollout engine whose policy differs from the trainer's.

The two differ in kernels, precision or weights. r = pi_train / pi_rollout of a token.

Importance weights multiply the policy loss:

    token       r per token (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
                Off-Policy RL Training")
    sequence    the product of a trajectory's r
    geometric   its geometric mean

They are limited to an upper bound (truncated), or set to 0 outside [lower, upper] (masked; IcePop,
Ling team 2025, arXiv:2510.18855).

Rejection removes tokens or trajectories from the loss, its denominators and the baselines of their
group (Liu, Li et al. 2025, "When Speed Kills Stability"). One criterion bounds the second moment of
log r over the batch (M2PO, Zheng et al. 2025, "Prosperity before Collapse", arXiv:2510.01161).

Numpy, without gradient. N trajectories, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_trainer.algorithms.arrays import BoolArray, FloatArray, IntArray, sum_by
from rl_trainer.algorithms.kl import SAFE_LOG
from rl_trainer.config.rollout_correction import SECOND_MOMENT, Bounds, Rejection


@dataclass(frozen=True, kw_only=True)
class MaskedRows:
    """Reductions over the unmasked tokens of each trajectory."""

    mask: BoolArray
    """[T]"""
    row: IntArray
    """[T] trajectory of each token."""
    count: FloatArray
    """[N] unmasked tokens."""

    @classmethod
    def of(cls, mask: BoolArray, offsets: IntArray) -> MaskedRows:
        """From a flat mask [T] and offsets [N + 1]."""
        row = np.repeat(np.arange(offsets.size - 1), np.diff(offsets))
        return cls(mask=mask, row=row, count=sum_by(row, mask, offsets.size - 1))

    @property
    def nonempty(self) -> BoolArray:
        """[N] trajectories with unmasked tokens; metrics ignore the others."""
        return self.count > 0

    def sum(self, x: FloatArray) -> FloatArray:
        """[N]"""
        return sum_by(self.row, np.where(self.mask, x, 0.0), self.count.size)

    def mean(self, x: FloatArray) -> FloatArray:
        """[N], 0 for a trajectory without unmasked tokens."""
        return self.sum(x) / np.maximum(self.count, 1)

    def max(self, x: FloatArray) -> FloatArray:
        """[N], -inf for a trajectory without unmasked tokens."""
        out = np.full(self.count.size, -np.inf)
        np.maximum.at(out, self.row[self.mask], x[self.mask])
        return out


def importance_weights(
    log_ratio: FloatArray, rows: MaskedRows, level: str, bounds: Bounds, *, normalize: bool = False
) -> tuple[FloatArray, dict[str, float]]:
    """Weights [T], 0 where masked, and their metrics.

    Args:
        log_ratio: [T] log pi_train - log pi_rollout.
        rows: the trajectories.
        level: one of IS_LEVELS.
        bounds: with a lower bound, weights outside are 0; without one, they are truncated.
        normalize: divide by the mean weight (over tokens at level "token", else over trajectories).
    """
    log_weight = log_ratio
    if level != "token":
        per_row = rows.sum(log_ratio) if level == "sequence" else rows.mean(log_ratio)
        log_weight = per_row[rows.row]
    raw = np.where(rows.mask, np.exp(np.clip(log_weight, -SAFE_LOG, SAFE_LOG)), 0.0)
    outside = raw > bounds.upper
    if bounds.lower is None:
        weights = np.minimum(raw, bounds.upper)
    else:
        outside = rows.mask & (outside | (raw < bounds.lower))
        weights = np.where(outside, 0.0, raw)
    metrics = _weight_metrics(raw, weights, rows, bounds, by_token=level == "token")
    if bounds.lower is not None:
        metrics["rollout_is_oob_ratio"] = _mean(outside, rows.mask)
    if normalize:
        mean = _mean(weights, rows.mask) if level == "token" else _mean(rows.mean(weights), rows.nonempty)
        metrics["rollout_is_batch_norm_factor"] = mean if mean > 1e-8 else 1.0
        weights = weights / metrics["rollout_is_batch_norm_factor"]
    return weights, metrics


def reject(
    log_ratio: FloatArray, rows: MaskedRows, rejections: Sequence[Rejection]
) -> tuple[BoolArray, dict[str, float]]:
    """The mask [T] without rejected tokens, and statistics and rejected fractions by criterion."""
    log_r = np.clip(log_ratio, -SAFE_LOG, SAFE_LOG)
    keep, metrics = rows.mask.copy(), dict[str, float]()
    for rejection in rejections:
        judge = _within_second_moment if rejection.criterion == SECOND_MOMENT else _within_bounds
        kept, found = judge(log_r, rows, rejection)
        name = f"rollout_rs_{rejection.criterion}"
        if rows.mask.any():
            metrics |= {f"{name}_{key}": value for key, value in found.items()} | _rejected_fractions(name, kept, rows)
        keep &= kept
    if rejections and rows.mask.any():
        metrics |= _rejected_fractions("rollout_rs", keep, rows)
    return keep, metrics


def _within_bounds(log_r: FloatArray, rows: MaskedRows, rejection: Rejection) -> tuple[BoolArray, dict[str, float]]:
    """The mask [T] of a criterion of tokens or rows, and its statistics."""
    level, kind = rejection.criterion.rsplit("_", 1)
    token = -log_r if kind == "k1" else 0.5 * log_r**2 if kind == "k2" else np.expm1(log_r) - log_r
    low, high = rejection.bounds.lower, rejection.bounds.upper
    if kind == "k1":
        low, high = math.log(low) if low is not None else None, math.log(high)
    reduce = {"token": rows.mean, "seq_sum": rows.sum, "seq_mean": rows.mean, "seq_max": rows.max}[level]
    per_row = reduce(token)
    statistic, seen = (token, rows.mask) if level == "token" else (per_row, rows.nonempty)
    too_high, too_low = statistic > high, statistic < (-np.inf if low is None else low)
    passes = ~(too_high | too_low)
    kept = rows.mask & (passes if level == "token" else passes[rows.row])
    if not seen.any():
        return kept, {}
    return kept, {
        "mean": _mean(token if level == "token" else per_row[rows.row], rows.mask),
        "max": float(statistic[seen].max()),
        "min": float(statistic[seen].min()),
        "fraction_high": _mean(too_high, seen),
        "fraction_low": _mean(too_low, seen),
    }


def _within_second_moment(
    log_r: FloatArray, rows: MaskedRows, rejection: Rejection
) -> tuple[BoolArray, dict[str, float]]:
    """The mask [T] without the largest squares, so that their mean is within the bound; equal ones
    are kept or rejected together.
    """
    squares = log_r**2
    ascending = np.sort(squares[rows.mask])
    means = np.cumsum(ascending) / np.arange(1, ascending.size + 1)
    count = int(np.searchsorted(means, rejection.bounds.upper, side="right"))
    kept = rows.mask & (squares < (ascending[count] if count < ascending.size else np.inf))
    return kept, {"mean": _mean(squares, rows.mask)} if ascending.size else {}


def _rejected_fractions(name: str, kept: BoolArray, rows: MaskedRows) -> dict[str, float]:
    affected = rows.max((~kept).astype(np.float64)) > 0
    return {
        f"{name}_masked_fraction": _mean(~kept, rows.mask),
        f"{name}_seq_masked_fraction": _mean(affected, rows.nonempty),
    }


def offpolicy_metrics(train_log_prob: FloatArray, rollout_log_prob: FloatArray, rows: MaskedRows) -> dict[str, float]:
    """Divergence of the two policies: KL(rollout || train) by k1 and k3, perplexities, chi-squared.

    Log-probs are [T], nats. A perplexity is exp(-mean log-prob) of a trajectory, averaged over
    trajectories. Empty if all tokens are masked.
    """
    if not rows.mask.any():
        return {}
    log_ratio = train_log_prob - rollout_log_prob
    train, rollout = rows.mean(train_log_prob)[rows.nonempty], rows.mean(rollout_log_prob)[rows.nonempty]
    difference, total = rollout - train, np.clip(rows.sum(log_ratio)[rows.nonempty], -SAFE_LOG, SAFE_LOG)
    log_r = np.clip(log_ratio, -SAFE_LOG, SAFE_LOG)
    return {
        "training_ppl": float(np.exp(-train).mean()),
        "training_log_ppl": float(-train.mean()),
        "rollout_ppl": float(np.exp(-rollout).mean()),
        "rollout_log_ppl": float(-rollout.mean()),
        "kl": _mean(-log_ratio, rows.mask),
        "k3_kl": _mean(np.expm1(log_r) - log_r, rows.mask),
        "log_ppl_diff": float(difference.mean()),
        "log_ppl_abs_diff": float(np.abs(difference).mean()),
        "log_ppl_diff_max": float(difference.max()),
        "log_ppl_diff_min": float(difference.min()),
        "ppl_ratio": float(np.exp(difference).mean()),
        "chi2_token": _mean(np.exp(2 * log_r), rows.mask) - 1,
        "chi2_seq": float(np.exp(2 * total).mean()) - 1,
    }


def _weight_metrics(
    raw: FloatArray, weights: FloatArray, rows: MaskedRows, bounds: Bounds, *, by_token: bool
) -> dict[str, float]:
    if not rows.mask.any():
        return {}
    used, low = weights[rows.mask], 1 / bounds.upper if bounds.lower is None else bounds.lower
    per_row, raw_per_row = rows.mean(weights)[rows.nonempty], rows.mean(raw)[rows.nonempty]
    ratios = raw[rows.mask] if by_token else raw_per_row
    square = float((used**2).mean())
    return {
        "rollout_is_mean": float(used.mean()),
        "rollout_is_std": float(used.std()),
        "rollout_is_max": float(used.max()),
        "rollout_is_min": float(used.min()),
        "rollout_is_eff_sample_size": float(used.mean()) ** 2 / square if square > 0 else 0.0,
        "rollout_is_ratio_fraction_high": float((ratios > bounds.upper).mean()),
        "rollout_is_ratio_fraction_low": float((ratios < low).mean()),
        "rollout_is_seq_mean": float(per_row.mean()),
        "rollout_is_seq_std": float(per_row.std(ddof=1)) if per_row.size > 1 else 0.0,
        "rollout_is_seq_max": float(per_row.max()),
        "rollout_is_seq_min": float(per_row.min()),
        "rollout_is_seq_max_deviation": float(np.abs(per_row - 1).max()),
        "rollout_is_seq_fraction_high": float((raw_per_row > bounds.upper).mean()),
        "rollout_is_seq_fraction_low": float((raw_per_row < low).mean()),
    }


def _mean(x: FloatArray | BoolArray, mask: BoolArray) -> float:
    return float(x[mask].mean()) if mask.any() else 0.0
