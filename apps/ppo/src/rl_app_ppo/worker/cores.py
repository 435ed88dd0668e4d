"""How many cores a worker process may compute with."""

from __future__ import annotations

import os


def cores_of_each(processes: int) -> int:
    """Compute threads of each of `processes` that share the cores of this process; at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // processes)
