"""Rows and memory that a session's requests took before their callers had the answers. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from rl_transferqueue.wire.arrays import Ints
from rl_transferqueue.wire.spans import Span


@dataclass(frozen=True, slots=True, eq=False)
class TakenRows:
    """Rows that a request marked as consumed."""

    partition: str
    task: str
    generations: Ints


Taken: TypeAlias = TakenRows | Span


class Unacknowledged:
    """What requests took, until their callers confirm the answers or leave without them.

    >>> unacknowledged = Unacknowledged()
    >>> unacknowledged.add(1, Span(0, 0, 64))
    >>> unacknowledged.add(2, Span(0, 64, 64))
    >>> unacknowledged.confirm([1])
    []
    >>> unacknowledged.pop(1), unacknowledged.pop(2)
    (None, Span(unit=0, offset=64, nbytes=64))
    """

    def __init__(self) -> None:
        self._taken: dict[int, Taken] = {}

    def add(self, request: int, taken: Taken) -> None:
        """Record what a request took; its answer is being sent."""
        self._taken[request] = taken

    def confirm(self, requests: Iterable[int]) -> list[int]:
        """The callers of these requests have the answers; returns those that took rows."""
        taken = {request: self._taken.pop(request, None) for request in requests}
        return [request for request, what in taken.items() if isinstance(what, TakenRows)]

    def pop(self, request: int) -> Taken | None:
        """Remove and return what to give back when the caller leaves without the answer."""
        return self._taken.pop(request, None)

    def pop_rows(self) -> list[TakenRows]:
        """Remove and return the rows to give back when the client has died; its memory ends with
        its session."""
        taken, self._taken = self._taken, {}
        return [rows for rows in taken.values() if isinstance(rows, TakenRows)]

    def forget(self, partition: str, task: str | None, generations: Ints) -> None:
        """Forget these rows (task None: for every task), so that a later `Cancel` does not give
        them back.

        Another caller may have claimed them since.
        """
        for request, taken in self._taken.items():
            if isinstance(taken, TakenRows) and taken.partition == partition and task in (None, taken.task):
                self._taken[request] = replace(taken, generations=np.setdiff1d(taken.generations, generations))
