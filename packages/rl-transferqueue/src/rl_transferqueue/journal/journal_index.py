"""Which puts hold which rows and segments. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from rl_transferqueue.journal.metadata import StoredPut


class JournalIndex:
    """The puts that still hold a row that is not cleared."""

    def __init__(self) -> None:
        self._puts: dict[int, StoredPut] = {}
        self._live: dict[int, set[int]] = {}
        self._holders: dict[int, set[int]] = {}
        self._bytes: defaultdict[int, int] = defaultdict(int)
        self._references: defaultdict[int, int] = defaultdict(int)
        self._next = 1

    def next_number(self) -> int:
        """Number of the next put."""
        return self._next

    def add(self, put: StoredPut) -> None:
        """Add a put with all of its rows."""
        self._next = max(self._next, put.number + 1)
        self._puts[put.number] = put
        self._live[put.number] = set(put.record.generations)
        for generation in put.record.generations:
            self._holders.setdefault(generation, set()).add(put.number)
        self._refer(put, 1)

    def move(self, put: StoredPut) -> None:
        """The put lies elsewhere now."""
        self._refer(self._puts[put.number], -1)
        self._puts[put.number] = put
        self._refer(put, 1)

    def clear(self, generations: Iterable[int]) -> tuple[set[int], list[StoredPut], set[int]]:
        """Clear rows; returns (rows that were held, puts without a row left, rows no put holds)."""
        cleared: set[int] = set()
        dead: list[StoredPut] = []
        for generation in generations:
            for number in self._holders.get(generation, ()):
                live = self._live[number]
                if generation in live:
                    cleared.add(generation)
                    live.remove(generation)
                    if not live:
                        dead.append(self._puts[number])
        forgotten = {it for put in dead for it in self._drop(put)}
        return cleared, dead, forgotten

    def unreferenced(self) -> set[int]:
        """Segments of which no put has a block any more."""
        return {segment for segment, count in self._references.items() if not count}

    def forget(self, segments: Iterable[int]) -> None:
        """These segments were removed."""
        for segment in segments:
            self._references.pop(segment, None)
            self._bytes.pop(segment, None)

    def segments(self) -> set[int]:
        """Segments with a block of some put."""
        return {segment for segment, count in self._references.items() if count}

    def live_bytes(self) -> dict[int, int]:
        """Segment -> bytes of its puts."""
        return {segment: self._bytes[segment] for segment in self.segments()}

    def put(self, number: int) -> StoredPut | None:
        """The put, if it still holds a row."""
        return self._puts.get(number)

    def puts_of(self, generations: Iterable[int]) -> list[StoredPut]:
        """Puts with columns of these rows, oldest first."""
        found = {number for row in generations for number in self._holders.get(row, ())}
        return [put for number in sorted(found) if (put := self._puts[number]).places]

    def later(self, put: StoredPut) -> list[StoredPut]:
        """Later puts with columns of rows of this one, oldest first."""
        return [it for it in self.puts_of(self._live[put.number]) if it.number > put.number]

    def puts_in(self, segments: set[int]) -> list[StoredPut]:
        """Puts with a block in one of the segments, oldest first."""
        return [
            self._puts[number]
            for number in sorted(self._puts)
            if any(place.segment in segments for place in self._puts[number].places.values())
        ]

    def _drop(self, put: StoredPut) -> set[int]:
        del self._puts[put.number], self._live[put.number]
        self._refer(put, -1)
        gone: set[int] = set()
        for generation in put.record.generations:
            self._holders[generation].discard(put.number)
            if not self._holders[generation]:
                del self._holders[generation]
                gone.add(generation)
        return gone

    def _refer(self, put: StoredPut, sign: int) -> None:
        for place in put.places.values():
            self._references[place.segment] += sign
            self._bytes[place.segment] += sign * place.nbytes
