"""How long and how much a server process lets the other side of a connection wait."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one connection of a server process.

    A connection stalls when the peer takes nothing of what waits to be sent, or stops in the middle of a frame. A connection on which
    nothing is under way may be silent as long as its process lives.
    """

    handshake_s: float = 5.0
    """Seconds until the peer has said who it is and sent its first request."""
    warn_s: float = 60.0
    """Seconds without progress after which a stalled connection is named in the log ..."""
    stall_s: float = 600.0
    """... and after which it is ended."""
    queue_bytes: int = 256 << 20
    """Bytes waiting to be sent, or requests waiting to be served, at which the connection is ended at once. Requests are not read while
    answers wait, so only answers to earlier requests and notices can get here."""


DEFAULT = Limits()
TRUSTED = Limits(handshake_s=math.inf, stall_s=math.inf, queue_bytes=1 << 62)
"""Between controller and storage units: a stopped process is named in the log and waited for."""


class Stall:
    """Since when a connection has made no progress, and what follows from it. Pure.

    >>> stall = Stall(Limits(warn_s=60, stall_s=600), now=0.0)
    >>> stall.due(now=60.0), stall.due(now=61.0), stall.due(now=600.0)
    ('warn', None, 'end')
    >>> stall.moved(now=600.0), stall.due(now=601.0), stall.next_s(now=601.0)
    (None, None, 59.0)
    """

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._since = now
        self._warned = False

    def moved(self, now: float) -> None:
        """Bytes were sent or received."""
        self._since = now
        self._warned = False

    def due(self, now: float) -> str | None:
        """ "warn" once, "end" when the time is up."""
        silent = now - self._since
        if silent >= self._limits.stall_s:
            return "end"
        if silent >= self._limits.warn_s and not self._warned:
            self._warned = True
            return "warn"
        return None

    def next_s(self, now: float) -> float:
        """Seconds until `due` may have something to say."""
        limit = self._limits.stall_s if self._warned else min(self._limits.warn_s, self._limits.stall_s)
        return max(0.0, self._since + limit - now)
