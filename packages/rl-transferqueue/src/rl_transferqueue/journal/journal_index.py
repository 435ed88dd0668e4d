"""Which puts hold which rows and segments. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rl_transferqueue.journal.metadata import StoredPut
from rl_transferqueue.journal.written_names import Names, written_names


class Dropped(NamedTuple):
    """What the journal needs no longer."""

    puts: list[StoredPut]
    rows: set[int]
    """Generations of rows that no put holds any more."""


@dataclass(slots=True)
class _Held:
    """A put that is needed.

    Attributes:
        live: its rows that are not cleared.
        names: what it writes.
        witness: position of the first row that needs it. Earlier ones are cleared, or later puts
            have written all of their columns and tags; neither is ever undone.
    """

    put: StoredPut
    live: set[int]
    names: Names | Mapping[int, Names]
    witness: int = 0

    def of(self, row: int) -> Names:
        """What it writes of a row, by its generation."""
        return self.names if isinstance(self.names, frozenset) else self.names[row]

    def needed_by(self, row: int) -> bool:
        """Whether the row is the witness."""
        rows = self.put.record.generations
        return self.witness < len(rows) and rows[self.witness] == row


class JournalIndex:
    """The puts of which some row is not cleared and not replaced: a row is replaced when later puts
    have written all of the columns and tags that the put has of it."""

    def __init__(self) -> None:
        self._puts: dict[int, _Held] = {}
        """In the order of their numbers."""
        self._holders: dict[int, set[int]] = {}
        self._bytes: defaultdict[int, int] = defaultdict(int)
        self._references: defaultdict[int, int] = defaultdict(int)
        self._next = 1

    def next_number(self) -> int:
        """Number of the next put."""
        return self._next

    def add(self, put: StoredPut) -> Dropped:
        """Add a put with all of its rows, later than all others; returns what it replaces."""
        self._next = max(self._next, put.number + 1)
        rows = put.record.generations
        made = self._puts[put.number] = _Held(put, set(rows), written_names(put))
        doubtful: set[int] = set()
        for row in rows:
            holders = self._holders.setdefault(row, set())
            for number in holders:
                held = self._puts[number]
                if held.needed_by(row) and (not (its := held.of(row)) or not its.isdisjoint(made.of(row))):
                    doubtful.add(number)
            holders.add(put.number)
        self._refer(put, 1)
        return self._drop_replaced(doubtful)

    def move(self, put: StoredPut) -> None:
        """The put lies elsewhere now."""
        held = self._puts[put.number]
        self._refer(held.put, -1)
        held.put = put
        self._refer(put, 1)

    def clear(self, generations: Iterable[int]) -> tuple[set[int], Dropped]:
        """Clear rows; returns those that were held, and what is not needed without them."""
        cleared: set[int] = set()
        doubtful: set[int] = set()
        for generation in generations:
            for number in self._holders.get(generation, ()):
                held = self._puts[number]
                if generation in held.live:
                    cleared.add(generation)
                    held.live.remove(generation)
                    if held.needed_by(generation):
                        doubtful.add(number)
        return cleared, self._drop_replaced(doubtful)

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

    def live_bytes(self, segment: int) -> int:
        """Bytes of the puts in a segment."""
        return self._bytes.get(segment, 0)

    def puts(self) -> list[StoredPut]:
        """All puts, oldest first."""
        return [held.put for held in self._puts.values()]

    def put(self, number: int) -> StoredPut | None:
        """The put, if it is still needed."""
        held = self._puts.get(number)
        return held.put if held is not None else None

    def puts_of(self, generations: Iterable[int]) -> list[StoredPut]:
        """Puts with columns of these rows, oldest first."""
        found = {number for row in generations for number in self._holders.get(row, ())}
        return [put for number in sorted(found) if (put := self._puts[number].put).places]

    def later(self, put: StoredPut) -> list[StoredPut]:
        """Later puts with columns of rows of this one, oldest first."""
        return [it for it in self.puts_of(self._puts[put.number].live) if it.number > put.number]

    def puts_in(self, segments: set[int]) -> list[StoredPut]:
        """Puts with a block in one of the segments, oldest first."""
        return [put for put in self.puts() if any(place.segment in segments for place in put.places.values())]

    def _drop_replaced(self, numbers: Iterable[int]) -> Dropped:
        dropped = Dropped([], set())
        for number in sorted(numbers):
            if self._is_replaced(number):
                dropped.puts.append(self._puts[number].put)
                dropped.rows.update(self._drop(number))
        return dropped

    def _is_replaced(self, number: int) -> bool:
        """Whether no row needs the put any more; moves its witness."""
        held = self._puts[number]
        rows = held.put.record.generations
        while held.witness < len(rows):
            row = rows[held.witness]
            if row in held.live and not self._covered(number, row):
                return False
            held.witness += 1
        return True

    def _covered(self, number: int, row: int) -> bool:
        """Whether later puts have the row, with all that the put has written of it."""
        rest = self._puts[number].of(row)
        for later in self._holders[row]:
            if later > number:
                names = self._puts[later].of(row)
                if rest <= names:
                    return True
                rest -= names
        return False

    def _drop(self, number: int) -> set[int]:
        put = self._puts.pop(number).put
        self._refer(put, -1)
        gone: set[int] = set()
        for generation in put.record.generations:
            self._holders[generation].discard(number)
            if not self._holders[generation]:
                del self._holders[generation]
                gone.add(generation)
        return gone

    def _refer(self, put: StoredPut, sign: int) -> None:
        for place in put.places.values():
            self._references[place.segment] += sign
            self._bytes[place.segment] += sign * place.nbytes
