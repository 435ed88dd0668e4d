"""The queue of puts that wait for memory. Pure.

Puts are served in order of arrival, with bounded overtaking: a put that fits overtakes earlier puts
that do not fit. A waiting put is overtaken by at most as many bytes as it needs itself; then no
later put is served before it. So a small put does not wait behind a large one while there is room,
and later puts delay a large put by at most its own size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rl_transferqueue.wire.spans import ALIGN, Span, rounded

T = TypeVar("T")


@dataclass(slots=True)
class _Entry:
    nbytes: int
    may_pass: int
    """Bytes of later puts that may still be served before this one."""


class MemoryQueue(Generic[T]):
    """Puts by arrival; `T` identifies one.

    >>> queue = MemoryQueue[str]()
    >>> queue.add("large", 1024), queue.add("small", 100)
    (None, None)
    >>> queue.serve(lambda _, nbytes: Span(0, 0, nbytes) if nbytes <= 512 else None)
    [('small', Span(unit=0, offset=0, nbytes=128))]
    >>> len(queue), queue.nbytes
    (1, 1024)
    """

    def __init__(self) -> None:
        self._entries: dict[T, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, put: T) -> bool:
        return put in self._entries

    @property
    def nbytes(self) -> int:
        """Bytes that all of them wait for."""
        return sum(entry.nbytes for entry in self._entries.values())

    def add(self, put: T, nbytes: int) -> None:
        """Append a put that needs `nbytes` bytes in one piece."""
        size = rounded(nbytes)
        self._entries[put] = _Entry(size, size)

    def discard(self, put: T) -> None:
        """Remove a put that no longer waits; nothing happens if it is not in the queue."""
        self._entries.pop(put, None)

    def clear(self) -> list[T]:
        """Remove and return all of them."""
        puts = list(self._entries)
        self._entries.clear()
        return puts

    def serve(self, take: Callable[[T, int], Span | None]) -> list[tuple[T, Span]]:
        """Remove and return the puts that get memory now.

        Args:
            take: returns memory for a put, or None if there is none of that size; larger sizes are
                not tried afterwards.
        """
        served: list[tuple[T, Span]] = []
        passed: list[tuple[_Entry, int]] = []
        """Entries left waiting, and the bytes that were served in this call before each."""
        done, limit = 0, float("inf")
        too_much = float("inf")
        for put, entry in list(self._entries.items()):
            if entry.nbytes <= limit - done and entry.nbytes < too_much:
                span = take(put, entry.nbytes)
                if span is not None:
                    del self._entries[put]
                    served.append((put, span))
                    done += entry.nbytes
                    continue
                too_much = entry.nbytes
            passed.append((entry, done))
            limit = min(limit, done + entry.may_pass)
            if limit - done < ALIGN:
                break
        for entry, before in passed:
            entry.may_pass -= done - before
        return served
