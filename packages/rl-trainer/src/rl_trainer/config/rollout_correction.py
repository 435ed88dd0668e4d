"""Settings of the correction for the mismatch between rollout engine and trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rl_protocol import ConfigError
from rl_protocol.support.options import Options, nearest, option, require

IS_LEVELS = ("token", "sequence", "geometric")


SECOND_MOMENT = "batch_m2"
RS_CRITERIA = (
    *(
        f"{level}_{kind}"
        for level, kinds in (("token", "123"), ("seq_sum", "123"), ("seq_mean", "123"), ("seq_max", "23"))
        for kind in (f"k{digit}" for digit in kinds)
    ),
    SECOND_MOMENT,
)
"""Level and estimator of the divergence: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r.

seq_mean_k1 is the geometric mean of 1 / r. batch_m2 rejects the tokens with the largest (log r)^2,
until its mean over the others is at most the threshold (M2PO).
"""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """A closed interval; lower None: no lower bound."""

    lower: float | None
    upper: float


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """Reject values outside `bounds`: of 1 / r for k1, of the divergence in nats for k2 and k3."""

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


def parse_rejections(names: Sequence[str], limits: Sequence[str], key: str) -> tuple[Rejection, ...]:
    """Parse criteria and their thresholds (one for all, or one each).

    A single number for k1 means [1 / number, number].

    Raises:
        ConfigError: a criterion is unknown, or the thresholds do not fit.
    """
    if names and len(limits) not in (1, len(names)):
        raise ConfigError(
            f"{key}_threshold must hold one threshold, or {len(names)} for {','.join(names)!r}; got {','.join(limits)!r}."
        )
    rejections: list[Rejection] = []
    for name, text in zip(names, [*limits] * len(names) if len(limits) == 1 else limits, strict=True):
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
class RolloutCorrectionConfig(Options):
    """Correction for the mismatch between the policies of rollout engine and trainer."""

    rollout_is: str = option(
        "", "importance weights per token, sequence or geometric; empty: none", choices=("", *IS_LEVELS), verl="."
    )
    rollout_is_threshold: str = option(
        "2.0", "largest weight (truncated), or lower_upper: weights outside become 0", needs="rollout_is", verl="."
    )
    rollout_is_batch_normalize: bool = option(False, "divide the weights by their mean over the batch", verl=".")
    rollout_rs: tuple[str, ...] = option((), "rejection criteria; empty: none", choices=RS_CRITERIA, verl=".")
    rollout_rs_threshold: tuple[str, ...] = option(
        (),
        "thresholds of rollout_rs, one for all or one each; k1: number or lower_upper of the ratio, others: nats, batch_m2: "
        "squared nats, such as 0.04",
        verl=".",
    )

    def check(self, path: str) -> None:
        require(
            bool(self.rollout_is) or not self.rollout_is_batch_normalize,
            f"{path}rollout_is_batch_normalize",
            f"false without {path}rollout_is",
            self.rollout_is_batch_normalize,
        )
        require(
            bool(self.rollout_rs) == bool(self.rollout_rs_threshold),
            f"{path}rollout_rs_threshold",
            f"set exactly when {path}rollout_rs is ({self.rollout_rs!r})",
            self.rollout_rs_threshold,
        )
        self.is_bounds(path)
        self.rejections(path)

    def is_bounds(self, path: str = "") -> Bounds:
        """`rollout_is_threshold`, parsed."""
        return parse_bounds(self.rollout_is_threshold, f"{path}rollout_is_threshold")

    def rejections(self, path: str = "") -> tuple[Rejection, ...]:
        """`rollout_rs` and its thresholds, parsed."""
        return parse_rejections(self.rollout_rs, self.rollout_rs_threshold, f"{path}rollout_rs")
