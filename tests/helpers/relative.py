"""How far float results are from the expected ones, relative to their size."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def apart(found: Any, want: Any) -> float:
    """The largest difference, as a share of the largest number of `want`.

    If all of these are 0, the result is 0 for equal numbers and else infinite.

    Args:
        found: numbers of any shape: lists, arrays, or tensors on the CPU.
        want: as many in the same shape.
    """
    one, other = (np.asarray(one.detach() if hasattr(one, "detach") else one, np.float64) for one in (found, want))
    assert one.shape == other.shape
    largest, size = float(np.abs(one - other).max()), float(np.abs(other).max())
    return largest / size if size else math.inf if largest else 0.0
