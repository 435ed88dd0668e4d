"""Memory a client has reserved ahead of need, so that a put takes one message. Pure."""

from __future__ import annotations

from rl_transferqueue.allocator import rounded
from rl_transferqueue.messages import Span

_PUTS = 16
"""Puts like the last one that a reservation should do for ..."""
_LEAST = 64 << 10
"""... but at least this many bytes, where the plane gives that much."""


class Regions:
    """What one client has in reserve: a single range, carved from its beginning.

    >>> regions = Regions(1 << 20)
    >>> regions.carve(100), regions.wish(100), regions.wish(100)
    (None, 65536, 0)
    >>> regions.add(Span(0, 4096, 65536)), regions.carve(100), regions.take()
    (None, Span(unit=0, offset=4096, nbytes=128), Span(unit=0, offset=4224, nbytes=65408))
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._spare: Span | None = None
        self._asked = False
        self._lost: set[int] = set()
        """Units that have ended."""

    def carve(self, nbytes: int) -> Span | None:
        """Memory for one put; None: not that much is in reserve."""
        spare, size = self._spare, rounded(nbytes)
        if spare is None or spare.nbytes < size:
            return None
        rest = Span(spare.unit, spare.offset + size, spare.nbytes - size)
        self._spare = rest if rest.nbytes else None
        return Span(spare.unit, spare.offset, size)

    def wish(self, nbytes: int) -> int:
        """Bytes to ask for with a put of `nbytes` bytes; 0: there is enough, or an answer is due."""
        size = rounded(nbytes)
        if self._asked or size > self._most or (self._spare is not None and self._spare.nbytes >= size):
            return 0
        self._asked = True
        return min(self._most, max(_LEAST, _PUTS * size))

    def add(self, spare: Span | None) -> Span | None:
        """The answer to a wish, be it nothing; returns what is left of the former reserve and is not needed."""
        self._asked = False
        if spare is None or spare.unit in self._lost:
            return None
        rest, self._spare = self._spare, spare
        return rest

    def take(self) -> Span | None:
        """The reserve, which is not here any more."""
        rest, self._spare = self._spare, None
        return rest

    def lose(self, unit: int) -> None:
        """A unit has ended: nothing of it is carved any more, nor taken into the reserve."""
        self._lost.add(unit)
        if self._spare is not None and self._spare.unit == unit:
            self._spare = None
