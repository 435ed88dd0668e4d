"""Puts and clears that are answered once the journal has them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec

from rl_protocol.errors import OutputError, PlaneLostError, RLError
from rl_transferqueue.controller.durable.journal_thread import Done, Read
from rl_transferqueue.controller.memory_accounting.capacity import Capacity
from rl_transferqueue.controller.memory_requests import Replies
from rl_transferqueue.controller.rows.ledger import Ledger
from rl_transferqueue.controller.rows.waiters import Served
from rl_transferqueue.journal.records import ClearRecord, PutRecord, Record
from rl_transferqueue.transport.control_server import Caller
from rl_transferqueue.wire.arrays import Ints
from rl_transferqueue.wire.header_cache import unpack_header
from rl_transferqueue.wire.messages import Clear, Cleared, Commit
from rl_transferqueue.wire.spans import Span

Loaded: TypeAlias = Callable[[RLError | None], None]
PAYLOAD = "payload"
"""Name of a put's block in its record."""


class RecordStore(Protocol):
    """Where records go to and come from: a `JournalThread`."""

    def write(self, record: Record, done: Done) -> None:
        """Call `done` with None once the record is durable, or with the error that prevented it."""
        ...

    def read(self, generations: Sequence[int], done: Read) -> None:
        """Call `done` with what `Journal.read` returns, or with the error that prevented it."""
        ...


class Outcomes(Protocol):
    """What follows from a change of rows."""

    def committed(self, caller: Caller, message: Commit, generations: Ints, served: Served) -> None:
        """A put is durable and was applied: answer it, and those whom it serves."""
        ...

    def cleared(self, served: Served) -> None:
        """Rows were cleared: answer those whom it serves, and free memory."""
        ...

    def freed(self) -> None:
        """Memory became free."""
        ...


@dataclass(slots=True)
class _Change:
    """A request that waits for earlier ones on the same rows."""

    caller: Caller
    partition: str
    keys: Sequence[str] | None
    begin: Callable[[], None]


@dataclass(slots=True)
class _Load:
    """Puts to be loaded, the newest last in the list, and what follows."""

    puts: list[PutRecord]
    done: Loaded


@dataclass(slots=True)
class DurableRows:
    """Writes each put to the journal before it is applied, so that nobody sees a row that a crash
    may lose.

    A clear is applied at once, and answered when it is durable. While a put is being written, other
    puts and clears of its rows wait. Rows can leave memory; they come back from the journal when
    they are read.

    Args:
        ledger, capacity: of the plane.
        journal: takes the records.
        memory: bytes of a span.
        replies: where errors and answers of clears go.
        outcomes: what follows.
    """

    ledger: Ledger
    capacity: Capacity
    journal: RecordStore
    memory: Callable[[Span], memoryview]
    replies: Replies
    outcomes: Outcomes
    _busy: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """Keys of the puts that are being written, by partition."""
    _waiting: deque[_Change] = field(default_factory=deque[_Change])
    _loads: deque[_Load] = field(default_factory=deque[_Load])
    """Those that wait for memory."""

    def put(self, caller: Caller, message: Commit) -> None:
        """Write a put, whose block the session has reserved.

        Raises:
            RLError: as `Ledger.commit` and `Capacity.check`; nothing was changed.
        """
        self._begin(_Change(caller, message.partition, message.keys, lambda: self._write(caller, message)))

    def clear(self, caller: Caller, message: Clear) -> None:
        """Clear rows."""
        self._begin(_Change(caller, message.partition, message.keys, lambda: self._clear(caller, message)))

    def load(self, generations: Ints, done: Loaded) -> None:
        """Bring rows from the journal to memory, as soon as there is room; then call `done`, with
        the error that prevented it or None."""

        def found(puts: tuple[PutRecord, ...] | OutputError) -> None:
            if isinstance(puts, OutputError):
                done(puts)
                return
            try:
                for put in puts:
                    self.capacity.check_size(len(put.columns[PAYLOAD]))
            except RLError as error:
                done(error)
                return
            self._loads.append(_Load(list(puts), done))
            self.continue_loading()

        self.journal.read(generations.tolist(), found)

    def continue_loading(self) -> None:
        """Load what waits for memory; call it when memory became free."""
        while self._loads and self._load(self._loads[0].puts):
            self._loads.popleft().done(None)

    def _load(self, puts: list[PutRecord]) -> bool:
        """Load puts from the newest to the oldest, and remove them from the list; returns whether
        there was room for all."""
        while puts:
            if self.ledger.wants(puts[-1]):
                payload = puts[-1].columns[PAYLOAD]
                block = self.capacity.take_any(len(payload))
                if block is None:
                    return False
                self.memory(block)[: len(payload)] = payload
                self.ledger.load(puts[-1], block)
            puts.pop()
        return True

    def _begin(self, change: _Change) -> None:
        if self._must_wait(change):
            self._waiting.append(change)
        else:
            change.begin()

    def _must_wait(self, change: _Change) -> bool:
        busy = self._busy.get(change.partition)
        if any(other.partition == change.partition for other in self._waiting):
            return True
        return busy is not None and (change.keys is None or not busy.isdisjoint(change.keys))

    def _write(self, caller: Caller, message: Commit) -> None:
        ledger, block = self.ledger, message.block
        if block is not None:
            self.capacity.check(caller.session, block)
        first = ledger.prepare(message.partition, message.keys, message.tags, block, message.header, message.expect)
        generations = ledger.generations(message.partition, message.keys, first)
        columns: dict[str, memoryview] = {}
        if block is not None:
            self.capacity.commit(caller.session, block)
            columns[PAYLOAD] = self.memory(block)[: unpack_header(message.header).payload]
        record = PutRecord(
            partition=message.partition,
            keys=message.keys,
            generations=tuple(generations.tolist()),
            header=message.header if block is not None else b"",
            tags=msgspec.msgpack.encode(message.tags),
            columns=columns,
        )
        self._busy.setdefault(message.partition, set()).update(message.keys)
        self.journal.write(record, lambda error: self._written(caller, message, first, generations, error))

    def _written(
        self, caller: Caller, message: Commit, first: int, generations: Ints, error: OutputError | None
    ) -> None:
        block = message.block
        if error is not None:
            if block is not None:
                self.capacity.give(block)
                self.outcomes.freed()
            self.replies.fail(caller, error)
        elif block is not None and not self.capacity.runs(block.unit):
            fresh = generations[generations >= first].tolist()
            self.journal.write(ClearRecord(tuple(fresh)), lambda _: None)
            what = f"Storage unit {block.unit} of the data plane ended during a put; repeat it."
            self.replies.fail(caller, PlaneLostError(what))
        else:
            applied, served = self.ledger.apply(
                message.partition, message.keys, message.tags, block, message.header, first
            )
            self.outcomes.committed(caller, message, applied, served)
        busy = self._busy[message.partition]
        busy.difference_update(message.keys)
        if not busy:
            del self._busy[message.partition]
        self._begin_waiting()

    def _clear(self, caller: Caller, message: Clear) -> None:
        generations = tuple(self.ledger.generations(message.partition, message.keys).tolist())
        count, served = self.ledger.clear(message.partition, message.keys)
        self.outcomes.cleared(served)

        def durable(error: OutputError | None) -> None:
            if error is None:
                self.replies.answer(caller, Cleared(count))
            else:
                self.replies.fail(caller, error)

        self.journal.write(ClearRecord(generations), durable)

    def _begin_waiting(self) -> None:
        """Begin the changes that need not wait any more, in their order."""
        waiting, self._waiting = self._waiting, deque()
        for change in waiting:
            try:
                self._begin(change)
            except RLError as error:
                self.replies.fail(change.caller, error)
