"""Correction for rollout engine and trainer being different policies (other kernels, other precision, older weights).

r = pi_train / pi_rollout of a token. Importance weights multiply the policy loss:
    token       r per token (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training")
    sequence    the product of a trajectory's r
    geometric   its geometric mean
held below an upper bound (truncated), or set to 0 outside [lower, upper] (masked, IcePop: Ling team 2025, arXiv:2510.18855).
Rejection takes tokens or whole trajectories out of the batch: out of the loss, its denominators, and the baselines of their group
(Liu, Li et al. 2025, "When Speed Kills Stability"). Numpy, no gradient. N trajectories, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_protocol import ConfigError
from rl_trainer.algorithms.episodes import BoolArray, FloatArray, IntArray, sum_by
from rl_trainer.algorithms.kl import SAFE_LOG
from rl_trainer.algorithms.registry import nearest

IS_LEVELS = ("token", "sequence", "geometric")
RS_CRITERIA = tuple(
    f"{level}_{kind}"
    for level, kinds in (("token", "123"), ("seq_sum", "123"), ("seq_mean", "123"), ("seq_max", "23"))
    for kind in (f"k{digit}" for digit in kinds)
)
"""Level and estimator of the divergence: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r. seq_mean_k1 is the geometric mean of 1 / r."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """A closed interval; lower None: no lower bound."""

    lower: float | None
    upper: float


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """Reject what is outside `bounds`: of 1 / r for k1, of the divergence in nats for k2 and k3."""

    criterion: str
    bounds: Bounds


def parse_bounds(text: str, key: str) -> Bounds:
    """`"2.0"` -> at most 2; `"0.5_5.0"` -> within [0.5, 5].

    Raises:
        ConfigError: not one or two positive numbers in order.
    """
    try:
        numbers = [float(part) for part in text.split("_")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(0 < x < math.inf for x in numbers) or sorted(numbers) != numbers:
        raise ConfigError(f"{key} must be one number such as 2.0 or two such as 0.5_5.0, positive; got {text!r}.")
    return Bounds(lower=numbers[0] if len(numbers) == 2 else None, upper=numbers[-1])


def parse_rejections(criteria: str, thresholds: str, key: str) -> tuple[Rejection, ...]:
    """Comma-separated criteria and their thresholds (one for all, or one each). A single number for k1 means [1 / number, number].

    Raises:
        ConfigError: an unknown criterion, or thresholds that do not fit.
    """
    names = [name.strip() for name in criteria.split(",") if name.strip()]
    limits = [text.strip() for text in thresholds.split(",") if text.strip()]
    if names and len(limits) not in (1, len(names)):
        raise ConfigError(
            f"{key}_threshold must hold one threshold, or {len(names)} for {criteria!r}; got {thresholds!r}."
        )
    rejections: list[Rejection] = []
    for name, text in zip(names, limits * len(names) if len(limits) == 1 else limits, strict=True):
        if name not in RS_CRITERIA:
            raise ConfigError(f"{key} must be of {', '.join(RS_CRITERIA)}; got {name!r}.{nearest(name, RS_CRITERIA)}")
        bounds = parse_bounds(text, f"{key}_threshold")
        if name.endswith("k1"):
            lower = 1 / bounds.upper if bounds.lower is None else bounds.lower
            if lower > bounds.upper:
                raise ConfigError(f"{key}_threshold of {name} must be at least 1 when it is one number; got {text!r}.")
            bounds = Bounds(lower=lower, upper=bounds.upper)
        elif bounds.lower is not None:
            raise ConfigError(
                f"{key}_threshold of {name} must be one number, a divergence can't be too small; got {text!r}."
            )
        rejections.append(Rejection(criterion=name, bounds=bounds))
    return tuple(rejections)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Reductions over the unmasked tokens of each trajectory."""

    mask: BoolArray
    """[T]"""
    row: IntArray
    """[T] trajectory of each token."""
    count: FloatArray
    """[N] unmasked tokens."""

    @classmethod
    def of(cls, mask: BoolArray, offsets: IntArray) -> Rows:
        """From flat masks and offsets [N + 1]."""
        row = np.repeat(np.arange(offsets.size - 1), np.diff(offsets))
        return cls(mask=mask, row=row, count=sum_by(row, mask, offsets.size - 1))

    @property
    def filled(self) -> BoolArray:
        """[N] trajectories with unmasked tokens; metrics look at no other."""
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
    log_ratio: FloatArray, rows: Rows, level: str, bounds: Bounds, *, normalize: bool = False
) -> tuple[FloatArray, dict[str, float]]:
    """Weights [T], 0 where masked, and their metrics.

    Args:
        log_ratio: [T] log pi_train - log pi_rollout.
        rows: the trajectories.
        level: one of IS_LEVELS.
        bounds: with a lower bound weights outside are 0, without one they are truncated.
        normalize: divide by the mean (over tokens, or over trajectories for the other levels), so that the average weight is 1.
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
        mean = _mean(weights, rows.mask) if level == "token" else _mean(rows.mean(weights), rows.filled)
        metrics["rollout_is_batch_norm_factor"] = mean if mean > 1e-8 else 1.0
        weights = weights / metrics["rollout_is_batch_norm_factor"]
    return weights, metrics


def reject(log_ratio: FloatArray, rows: Rows, rejections: Sequence[Rejection]) -> tuple[BoolArray, dict[str, float]]:
    """The mask [T] without what any criterion rejects, and metrics: per criterion its statistic and the shares it rejects."""
    log_r = np.clip(log_ratio, -SAFE_LOG, SAFE_LOG)
    keep, metrics = rows.mask.copy(), dict[str, float]()
    for rejection in rejections:
        level, kind = rejection.criterion.rsplit("_", 1)
        token = -log_r if kind == "k1" else 0.5 * log_r**2 if kind == "k2" else np.expm1(log_r) - log_r
        low, high = rejection.bounds.lower, rejection.bounds.upper
        if kind == "k1":
            low, high = math.log(low) if low is not None else None, math.log(high)
        reduce = {"token": rows.mean, "seq_sum": rows.sum, "seq_mean": rows.mean, "seq_max": rows.max}[level]
        per_row = reduce(token)
        statistic, seen = (token, rows.mask) if level == "token" else (per_row, rows.filled)
        too_high, too_low = statistic > high, statistic < (-np.inf if low is None else low)
        passes = ~(too_high | too_low)
        kept = rows.mask & (passes if level == "token" else passes[rows.row])
        name = f"rollout_rs_{rejection.criterion}"
        if seen.any():
            metrics |= {f"{name}_mean": _mean(token if level == "token" else per_row[rows.row], rows.mask)}
            metrics |= {f"{name}_max": float(statistic[seen].max()), f"{name}_min": float(statistic[seen].min())}
            metrics |= {f"{name}_fraction_high": _mean(too_high, seen), f"{name}_fraction_low": _mean(too_low, seen)}
            metrics |= _rejected_shares(name, kept, rows)
        keep &= kept
    if rejections and rows.mask.any():
        metrics |= _rejected_shares("rollout_rs", keep, rows)
    return keep, metrics


def _rejected_shares(name: str, kept: BoolArray, rows: Rows) -> dict[str, float]:
    touched = rows.max((~kept).astype(np.float64)) > 0
    return {
        f"{name}_masked_fraction": _mean(~kept, rows.mask),
        f"{name}_seq_masked_fraction": _mean(touched, rows.filled),
    }


def offpolicy_metrics(train_log_prob: FloatArray, rollout_log_prob: FloatArray, rows: Rows) -> dict[str, float]:
    """How far apart the two policies are: KL(rollout || train) by k1 and k3, perplexities, chi-squared. Nothing where all is masked.

    Log-probs are [T], nats; a perplexity is exp(-mean log-prob) of a trajectory, averaged over trajectories.
    """
    if not rows.mask.any():
        return {}
    log_ratio = train_log_prob - rollout_log_prob
    train, rollout = rows.mean(train_log_prob)[rows.filled], rows.mean(rollout_log_prob)[rows.filled]
    difference, total = rollout - train, np.clip(rows.sum(log_ratio)[rows.filled], -SAFE_LOG, SAFE_LOG)
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
    raw: FloatArray, weights: FloatArray, rows: Rows, bounds: Bounds, *, by_token: bool
) -> dict[str, float]:
    if not rows.mask.any():
        return {}
    used, low = weights[rows.mask], 1 / bounds.upper if bounds.lower is None else bounds.lower
    per_row, raw_per_row = rows.mean(weights)[rows.filled], rows.mean(raw)[rows.filled]
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
