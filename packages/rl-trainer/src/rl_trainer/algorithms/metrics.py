"""Mask-aware statistics and weighted means. Metrics are plain floats; their names follow verl's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt


def stats(name: str, values: npt.ArrayLike, mask: npt.NDArray[np.bool_] | None = None) -> dict[str, float]:
    """`name/mean`, `name/max`, `name/min` of the unmasked values; empty without any."""
    array = np.asarray(values, dtype=np.float64)
    chosen = array if mask is None else array[mask]
    if chosen.size == 0:
        return {}
    return {
        f"{name}/mean": float(chosen.mean()),
        f"{name}/max": float(chosen.max()),
        f"{name}/min": float(chosen.min()),
    }


def length_stats(lengths: npt.ArrayLike, longest_allowed: int) -> dict[str, float]:
    """Statistics of the lengths of responses, and `clip_ratio`: the fraction at the maximum."""
    array = np.asarray(lengths, dtype=np.int64)
    out = stats("response_length", array)
    if array.size:
        out["response_length/clip_ratio"] = float((array >= longest_allowed).mean())
    return out


class WeightedMeans:
    """Means over parts of different sizes: each part adds its sum and its weight.

    >>> m = WeightedMeans()
    >>> m.add({"loss": 6.0}, weight=3); m.add({"loss": 2.0}, weight=1)
    >>> m.result()
    {'loss': 2.0}
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def add(self, sums: Mapping[str, float], weight: float) -> None:
        """Add sums over `weight` elements."""
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def total(self, sum_over_ranks: Callable[[Sequence[float]], list[float]]) -> WeightedMeans:
        """The sums and weights of all ranks; every rank must have added the same names."""
        names, out = sorted(self._sums), WeightedMeans()
        numbers = sum_over_ranks([*(self._sums[name] for name in names), *(self._weights[name] for name in names)])
        out._sums = dict(zip(names, numbers[: len(names)], strict=True))
        out._weights = dict(zip(names, numbers[len(names) :], strict=True))
        return out

    def parts(self) -> dict[str, tuple[float, float]]:
        """Name -> (sum, weight) added so far."""
        return {name: (value, self._weights[name]) for name, value in self._sums.items()}

    def result(self) -> dict[str, float]:
        """Sum / weight of every name with a weight above 0."""
        return {name: self._sums[name] / w for name, w in self._weights.items() if w > 0}


def explained_variance(
    values: npt.NDArray[np.float64],
    returns: npt.NDArray[np.float64],
    sum_over_ranks: Callable[[Sequence[float]], list[float]] = list,
) -> float:
    """1 - Var(returns - values) / Var(returns) over all ranks; 0 if the returns do not vary."""
    error = returns - values
    size, *means = sum_over_ranks([float(returns.size), float(returns.sum()), float(error.sum())])
    mean, bias = (total / max(size, 1.0) for total in means)
    spread, missed = sum_over_ranks([float(((returns - mean) ** 2).sum()), float(((error - bias) ** 2).sum())])
    return 1.0 - missed / spread if spread > 0 else 0.0
