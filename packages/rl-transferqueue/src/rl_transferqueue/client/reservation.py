"""Memory that a client reserves ahead, so that a put takes one message. Pure."""

from __future__ import annotations

from rl_transferqueue.wire.spans import Span, rounded

_PUTS = 16
"""A reservation has room for this many puts of the current size ..."""
_LEAST = 64 << 10
"""... and at least this many bytes, up to the plane's limit."""


class Reservation:
    """The reserved memory of one client: a single range, carved from its beginning.

    >>> reserved = Reservation(1 << 20)
    >>> reserved.carve(100), reserved.request(100), reserved.request(100)
    (None, 65536, 0)
    >>> reserved.add(Span(0, 4096, 65536)), reserved.carve(100), reserved.take()
    (None, Span(unit=0, offset=4096, nbytes=128), Span(unit=0, offset=4224, nbytes=65408))

    Args:
        most: most bytes to reserve.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._spare: Span | None = None
        self._asked = False
        self._lost: set[int] = set()
        """Units that have ended."""

    def carve(self, nbytes: int) -> Span | None:
        """Memory for one put; None if the reserve is too small."""
        spare, size = self._spare, rounded(nbytes)
        if spare is None or spare.nbytes < size:
            return None
        rest = Span(spare.unit, spare.offset + size, spare.nbytes - size)
        self._spare = rest if rest.nbytes else None
        return Span(spare.unit, spare.offset, size)

    def request(self, nbytes: int) -> int:
        """Bytes to request with a put of `nbytes`; 0 if none is needed or one is under way."""
        size = rounded(nbytes)
        if self._asked or size > self._most or (self._spare is not None and self._spare.nbytes >= size):
            return 0
        self._asked = True
        return min(self._most, max(_LEAST, _PUTS * size))

    def add(self, spare: Span | None) -> Span | None:
        """Add the answer to a request (None: refused); return the old reserve, to give back."""
        self._asked = False
        if spare is None or spare.unit in self._lost:
            return None
        rest, self._spare = self._spare, spare
        return rest

    def take(self) -> Span | None:
        """Remove and return the reserve."""
        rest, self._spare = self._spare, None
        return rest

    def drop(self) -> None:
        """The controller has ended, and what it reserved is not reserved any more."""
        self._spare, self._asked = None, False

    def lose(self, unit: int) -> None:
        """Drop a unit that has ended from the reserve, and refuse later answers with it."""
        self._lost.add(unit)
        if self._spare is not None and self._spare.unit == unit:
            self._spare = None
