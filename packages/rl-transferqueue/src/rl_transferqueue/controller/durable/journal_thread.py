"""The thread that writes the journal of a plane, since a sync blocks."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

from rl_protocol.errors import OutputError, RLError
from rl_protocol.support.fault_points import FaultPoint, reach
from rl_transferqueue.controller.durable.reactor_calls import ReactorCalls
from rl_transferqueue.journal.disk_journal import open_journal
from rl_transferqueue.journal.records import Block, FoundPut, Journal, PutRecord, Record, Recovered
from rl_transferqueue.transport.event_loop import Reactor

log = logging.getLogger(__name__)

Done: TypeAlias = Callable[[OutputError | None], None]
Wanted: TypeAlias = Callable[[PutRecord], bool]
Found: TypeAlias = Callable[[tuple[FoundPut, ...] | OutputError], None]
Read: TypeAlias = Callable[[Mapping[int, Mapping[str, Block] | None] | OutputError], None]
T = TypeVar("T")
_JOIN_S = 30.0
"""Seconds that the last write may take at the end."""


class _Entry(NamedTuple):
    record: Record
    done: Done


class _Query(NamedTuple):
    answer: Callable[[Journal], Callable[[], None]]
    """Asks the journal; returns the call back with its answer."""


class JournalThread:
    """Makes records durable, in order; each is called back in the reactor's thread.

    What arrives while the disk is busy shares the next commit.

    Args:
        reactor: runs the callbacks.
        folder: of the journal, made if missing.
        each: commit every record by itself.
        successor: the sessions of the process before continue; keep the answers to their puts.

    Raises:
        ConfigError: the folder is on a network file system, or another process uses its journal.
        OutputError: its files can't be read or made.
    """

    def __init__(self, reactor: Reactor, folder: Path, *, each: bool, successor: bool = False) -> None:
        self._folder = folder
        self._each = each
        self._successor = successor
        self._queue: queue.SimpleQueue[_Entry | _Query | None] = queue.SimpleQueue()
        self._calls = ReactorCalls(reactor)
        opened: queue.SimpleQueue[Recovered | RLError] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="journal", daemon=True)
        self._thread.start()
        found = opened.get()
        if isinstance(found, RLError):
            self._calls.close()
            raise found
        self.recovered = found
        """What the journal held."""

    def write(self, record: Record, done: Done) -> None:
        """Call `done` with None once the record is durable, or with the error that prevented it."""
        self._queue.put(_Entry(record, done))

    def find(self, generations: Sequence[int], wanted: Wanted, done: Found) -> None:
        """Call `done` with what `Journal.find` returns, or with the error that prevented it."""
        self._ask(lambda journal: journal.find(generations, wanted), done)

    def read(self, numbers: Sequence[int], done: Read) -> None:
        """Call `done` with what `Journal.read` returns, or with the error that prevented it."""
        self._ask(lambda journal: journal.read(numbers), done)

    def close(self) -> None:
        """Write what is queued, without calling back, and close the journal."""
        self._queue.put(None)
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            log.error("the journal in %s has not ended its last write within %g s", self._folder, _JOIN_S)
            return
        self._calls.close()

    def _ask(self, question: Callable[[Journal], T], done: Callable[[T | OutputError], None]) -> None:
        def answer(journal: Journal) -> Callable[[], None]:
            return partial(done, _answer(journal, question))

        self._queue.put(_Query(answer))

    # -- in the thread
    def _run(self, opened: queue.SimpleQueue[Recovered | RLError]) -> None:
        try:
            with open_journal(self._folder, keep_answers=self._successor) as journal:
                opened.put(journal.recover())
                self._serve(journal)
        except RLError as error:
            opened.put(error)

    def _serve(self, journal: Journal) -> None:
        while batch := self._next():
            entries = [it for it in batch if isinstance(it, _Entry)]
            for part in [[entry] for entry in entries] if self._each else [entries] if entries else []:
                self._calls.post(partial(entry.done, error) for entry, error in _commit(journal, part))
            for query in (it for it in batch if isinstance(it, _Query)):
                self._calls.post([query.answer(journal)])
            if entries and self._queue.empty():
                _compact(journal)

    def _next(self) -> list[_Entry | _Query]:
        """Wait for records and queries, and return all there are; none: the thread ends."""
        batch: list[_Entry | _Query] = []
        while not batch or not self._queue.empty():
            entry = self._queue.get()
            if entry is None:
                self._queue.put(None)  # for the next call
                break
            batch.append(entry)
        return batch


def _commit(journal: Journal, batch: Sequence[_Entry]) -> list[tuple[_Entry, OutputError | None]]:
    """Append and sync; returns each entry with its error."""
    outcomes: list[tuple[_Entry, OutputError | None]] = []
    for entry in batch:
        try:
            journal.append([entry.record])
        except OutputError as error:
            outcomes.append((entry, error))
        else:
            outcomes.append((entry, None))
    reach(FaultPoint.JOURNAL_APPENDED)
    try:
        journal.sync()
    except OutputError as error:
        return [(entry, earlier or error) for entry, earlier in outcomes]
    reach(FaultPoint.JOURNAL_COMMITTED)
    return outcomes


def _answer(journal: Journal, question: Callable[[Journal], T]) -> T | OutputError:
    try:
        return question(journal)
    except OutputError as error:
        return error


def _compact(journal: Journal) -> None:
    try:
        journal.compact()
    except OutputError as error:  # every later append raises it again
        log.error("%s", error)
