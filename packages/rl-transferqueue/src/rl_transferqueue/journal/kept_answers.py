"""Which answers to puts the journal keeps: the last ones of each session. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from rl_transferqueue.journal.records import Origin

KEPT = 256
"""Puts of a session whose answers are kept."""


class KeptAnswers:
    """The puts of each session whose answers the metadata has, and what has changed.

    >>> answers = KeptAnswers()
    >>> answers.add(Origin(b"session1", 7), b"packed")
    >>> answers.take_changes(), answers.take_changes()
    (({Origin(session=b'session1', request=7): b'packed'}, []), ({}, []))
    """

    def __init__(self) -> None:
        self._requests: dict[bytes, deque[int]] = {}
        self._new: dict[Origin, bytes] = {}
        self._old: list[Origin] = []

    def restore(self, found: Mapping[Origin, bytes]) -> Mapping[Origin, bytes]:
        """Start with these, which are in the order of their requests; returns them."""
        for session, request in found:
            self._requests.setdefault(session, deque()).append(request)
        return found

    def add(self, origin: Origin, generations: bytes) -> None:
        """A put was appended, with the packed generations of its rows."""
        kept = self._requests.setdefault(origin.session, deque())
        kept.append(origin.request)
        self._new[origin] = generations
        if len(kept) > KEPT:
            self._old.append(Origin(origin.session, kept.popleft()))

    def take_changes(self) -> tuple[Mapping[Origin, bytes], list[Origin]]:
        """Answers to add, and those to delete after that."""
        new, old = self._new, self._old
        self._new, self._old = {}, []
        return new, old
