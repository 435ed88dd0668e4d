"""Rows and memory that requests of one session took and whose callers may not have the answer yet. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from rl_transferqueue.messages import Span
from rl_transferqueue.table import Ints


@dataclass(frozen=True, slots=True, eq=False)
class TakenRows:
    """Rows that a request marked as consumed."""

    partition: str
    task: str
    uids: Ints


Taken: TypeAlias = TakenRows | Span


class Handouts:
    """Request -> what it took, until the client says that the caller has the answer or has left without it.

    >>> handouts = Handouts()
    >>> handouts.add(1, Span(0, 0, 64)), handouts.add(2, Span(0, 64, 64)), handouts.confirm([1])
    (None, None, None)
    >>> handouts.pop(1), handouts.pop(2)
    (None, Span(unit=0, offset=64, nbytes=64))
    """

    def __init__(self) -> None:
        self._taken: dict[int, Taken] = {}

    def add(self, request: int, taken: Taken) -> None:
        """The request took this; its answer is being sent."""
        self._taken[request] = taken

    def confirm(self, requests: Iterable[int]) -> None:
        """The callers of these requests have the answers."""
        for request in requests:
            self._taken.pop(request, None)

    def pop(self, request: int) -> Taken | None:
        """What is to be given back because the caller has left without the answer."""
        return self._taken.pop(request, None)

    def pop_rows(self) -> list[TakenRows]:
        """Rows that are to be given back because the client has died; its memory goes with its session."""
        taken, self._taken = self._taken, {}
        return [rows for rows in taken.values() if isinstance(rows, TakenRows)]

    def forget(self, partition: str, task: str | None, uids: Ints) -> None:
        """Forget these rows (task None: for every task): a later Cancel must not take them from the task that claims them next."""
        for request, taken in self._taken.items():
            if isinstance(taken, TakenRows) and taken.partition == partition and task in (None, taken.task):
                self._taken[request] = replace(taken, uids=np.setdiff1d(taken.uids, uids))
