"""How many cores a worker process may compute with."""

from __future__ import annotations

from rl_protocol.support.host.this_process import usable_cores


def cores_of_each(processes: int) -> int:
    """Compute threads of each of `processes` that share the cores of this process; at least 1."""
    return max(1, usable_cores() // processes)
