"""Limits of connections: how long a peer may stall and how much may wait for it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one connection of a server process.

    A connection stalls when bytes wait to be sent and the peer does not read, or when a frame is
    incomplete. An idle connection may be silent as long as its process lives.
    """

    handshake_s: float = 5.0
    """Deadline in seconds for the peer's identity and first request."""
    warn_s: float = 60.0
    """Seconds without progress after which a stalled connection is named in the log ..."""
    stall_s: float = 600.0
    """... and after which it is ended."""
    queue_bytes: int = 256 << 20
    """Most bytes that may wait to be sent or handled; more end the connection at once.

    Requests are not read while answers wait, so only earlier answers and notices can exceed it.
    """


DEFAULT = Limits()
TRUSTED = Limits(handshake_s=math.inf, stall_s=math.inf, queue_bytes=1 << 62)
"""Between controller and storage units: a stopped process is logged and waited for."""


class Stall:
    """Measures how long a connection makes no progress. Pure.

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
        """ "warn" once after `warn_s`, "end" after `stall_s`, else None."""
        silent = now - self._since
        if silent >= self._limits.stall_s:
            return "end"
        if silent >= self._limits.warn_s and not self._warned:
            self._warned = True
            return "warn"
        return None

    def next_s(self, now: float) -> float:
        """Seconds until `due` may return something."""
        limit = self._limits.stall_s if self._warned else min(self._limits.warn_s, self._limits.stall_s)
        return max(0.0, self._since + limit - now)
