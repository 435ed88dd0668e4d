"""Deadlines on the monotonic clock, as floats."""

from __future__ import annotations

from time import monotonic

SERVER_GRACE_S = 1.0
"""Seconds to wait past a deadline that the server keeps itself, so that it can explain it."""


def deadline_after(seconds: float) -> float:
    """The time in `seconds`."""
    return monotonic() + seconds


def seconds_until(deadline: float) -> float:
    """Seconds until a deadline; 0.0 once it has passed.

    >>> seconds_until(deadline_after(-1.0)), seconds_until(deadline_after(60.0)) > 0
    (0.0, True)
    """
    left = deadline - monotonic()
    return left if left > 0.0 else 0.0
