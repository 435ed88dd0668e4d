"""How far float results are from the expected ones, relative to their size."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest


def apart(found: Any, want: Any, terms: Any = None) -> float:
    """The largest difference, as a share of the largest number of `terms`.

    If all of these are 0, the result is 0 for equal numbers and else infinite.

    Args:
        found: numbers of any shape: lists, arrays, or tensors on the CPU.
        want: as many in the same shape.
        terms: numbers whose sums or differences are compared. None: those of `want`, which must not
            be small differences of larger numbers.
    """
    one, other = _array(found), _array(want)
    assert one.shape == other.shape
    largest, size = float(np.abs(one - other).max()), float(np.abs(other if terms is None else _array(terms)).max())
    return largest / size if size else math.inf if largest else 0.0


def near(want: Any, share: float, batch: Any) -> Any:
    """pytest.approx for the metrics of an update.

    A metric may be a small difference of large numbers, so its error is also compared with the
    largest of these: a float of the batch, or 1 for ratios of probabilities.

    Args:
        want: numbers by name.
        share: largest error, as a share of the metric or of the largest number.
        batch: the BatchData of the update.
    """
    floats = [batch[name].values for name in batch.columns if batch[name].dtype.startswith("float")]
    return pytest.approx(want, rel=share, abs=share * max(1.0, *(float(np.abs(one).max()) for one in floats)))


def _array(numbers: Any) -> Any:
    return np.asarray(numbers.detach() if hasattr(numbers, "detach") else numbers, np.float64)
