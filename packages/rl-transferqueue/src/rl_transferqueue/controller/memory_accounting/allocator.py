"""A free-list allocator for the bytes of an arena. Pure: no memory is touched.

Free ranges are kept in bins by size (bin k: 2^k <= size < 2^(k+1)) and in two maps by their ends,
so taking, giving back and merging neighbours take constant time. A range comes from the smallest
bin whose ranges all fit, after a short search of the bin where some fit. The untouched end of the
arena is the largest range and so is used last.
"""

from __future__ import annotations

from itertools import islice

from rl_transferqueue.wire.spans import ALIGN, rounded

_LOOK = 16
"""Ranges of the first bin that are tried before a larger range is split."""


class Allocator:
    """Ranges of an arena of `capacity` bytes (a multiple of 64).

    >>> space = Allocator(256)
    >>> first, second = space.take(100), space.take(10)
    >>> first, second, space.take(100), space.used
    (0, 128, None, 192)
    >>> space.give(0, 64), space.largest, space.give(64, 128), space.largest
    (None, 64, None, 256)
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        assert capacity % ALIGN == 0
        self.capacity = capacity
        self.used = 0
        self.high_water = 0
        """End of the highest range ever taken."""
        self._free: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._bins: list[dict[int, None]] = [{} for _ in range(capacity.bit_length())]
        self._insert(0, capacity)

    @property
    def largest(self) -> int:
        """Bytes of the largest free range."""
        for members in reversed(self._bins):
            if members:
                return max(self._free[start] for start in members)
        return 0

    def take(self, nbytes: int) -> int | None:
        """Start of a range of at least `nbytes` bytes, or None: no free range is long enough."""
        size = rounded(nbytes)
        start = self._find(size)
        if start is None:
            return None
        length = self._remove(start)
        if length > size:
            self._insert(start + size, length - size)
        self.used += size
        self.high_water = max(self.high_water, start + size)
        return start

    def give(self, start: int, nbytes: int) -> None:
        """Give back any aligned part of a range that was taken; it must not be free already."""
        size = rounded(nbytes)
        self.used -= size
        low, high = start, start + size
        if high in self._free:
            high += self._remove(high)
        if low in self._ends:
            low = self._ends[low]
            self._remove(low)
        self._insert(low, high - low)

    def _find(self, size: int) -> int | None:
        first = size.bit_length() - 1
        if first >= len(self._bins):
            return None
        for start in islice(self._bins[first], _LOOK):
            if self._free[start] >= size:
                return start
        for members in self._bins[first + 1 :]:
            if members:
                return next(iter(members))
        return next((start for start in self._bins[first] if self._free[start] >= size), None)

    def _insert(self, start: int, size: int) -> None:
        self._free[start] = size
        self._ends[start + size] = start
        self._bins[size.bit_length() - 1][start] = None

    def _remove(self, start: int) -> int:
        size = self._free.pop(start)
        del self._ends[start + size]
        del self._bins[size.bit_length() - 1][start]
        return size
