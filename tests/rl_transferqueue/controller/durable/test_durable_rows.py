"""Durable puts and clears over a journal whose writes end when a test says so."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from rl_protocol import BatchData, ConflictError, OutputError, dense
from rl_protocol.errors import PlaneLostError, RLError
from rl_protocol.wire import plan
from rl_transferqueue.controller.durable.durable_rows import PAYLOAD, DurableRows
from rl_transferqueue.controller.durable.journal_thread import Done
from rl_transferqueue.controller.memory_accounting.capacity import Capacity
from rl_transferqueue.controller.rows.ledger import Ledger
from rl_transferqueue.controller.rows.waiters import Served
from rl_transferqueue.journal.records import ClearRecord, PutRecord, Record
from rl_transferqueue.transport.control_server import Caller
from rl_transferqueue.wire.arrays import Ints
from rl_transferqueue.wire.messages import Answer, Clear, Cleared, Commit, TagColumn
from rl_transferqueue.wire.spans import Span

SESSION = b"session1"


class World:
    """The collaborators of `DurableRows`, which record what they are told."""

    def __init__(self) -> None:
        self.ledger, self.capacity = Ledger(), Capacity(2, 4096)
        self.memory = {unit: bytearray(4096) for unit in range(2)}
        self.records: list[tuple[Record, Done]] = []
        self.answers: list[tuple[int, Answer | RLError]] = []
        self.puts: list[int] = []
        self.requests = 0
        self.rows = DurableRows(self.ledger, self.capacity, self, self.bytes_of, self, self)

    def bytes_of(self, span: Span) -> memoryview:
        return memoryview(self.memory[span.unit])[span.offset : span.offset + span.nbytes]

    # the journal
    def write(self, record: Record, done: Done) -> None:
        self.records.append((record, done))

    def end(self, error: OutputError | None = None) -> Record:
        """End the oldest write."""
        record, done = self.records.pop(0)
        done(error)
        return record

    # replies and outcomes
    def answer(self, caller: Caller, body: Answer) -> None:
        self.answers.append((caller.request, body))

    def fail(self, caller: Caller, error: RLError) -> None:
        self.answers.append((caller.request, error))

    def committed(self, caller: Caller, message: Commit, generations: Ints, served: Served) -> None:
        self.puts.append(caller.request)

    def cleared(self, served: Served) -> None: ...

    def freed(self) -> None: ...

    # requests
    def put(self, *keys: str, n: int = 0, data: bool = False, expect: tuple[None, ...] | None = None) -> int:
        self.requests += 1
        message = Commit("p", keys, (TagColumn("n", (n,) * len(keys)),), expect)
        if data:
            batch = BatchData({"x": dense(np.arange(len(keys)) + n)})
            header = plan(batch)
            span = self.capacity.reserve(SESSION, header.payload)
            assert span is not None
            self.bytes_of(span)[:8] = bytes([n] * 8)
            message = msgspec.structs.replace(message, block=span, header=msgspec.msgpack.encode(header))
        self.rows.put(Caller(SESSION, self.requests), message)
        return self.requests

    def clear(self, *keys: str) -> int:
        self.requests += 1
        self.rows.clear(Caller(SESSION, self.requests), Clear("p", keys or None))
        return self.requests

    def keys(self) -> tuple[str, ...]:
        return self.ledger.list_rows("p", {}).keys


def test_nobody_sees_a_row_before_the_journal_has_it() -> None:
    world = World()
    put = world.put("a", "b", n=7, data=True)
    assert (world.keys(), world.puts) == ((), [])
    record = world.end()
    assert isinstance(record, PutRecord)
    assert (record.keys, record.generations, bytes(record.columns[PAYLOAD])[:8]) == (("a", "b"), (1, 2), b"\7" * 8)
    assert (world.keys(), world.puts) == (("a", "b"), [put])


def test_changes_of_rows_that_are_being_written_wait_in_their_order() -> None:
    world = World()
    first, other = world.put("a", n=1), world.put("b")
    again = world.put("a", "c", n=2)
    conflict = world.put("c", expect=(None,))
    cleared = world.clear()
    assert len(world.records) == 2
    world.end()
    assert [type(record) for record, _ in world.records] == [PutRecord, PutRecord]  # b, and a with c
    world.end()
    assert world.puts == [first, other]
    record = world.end()
    assert isinstance(record, PutRecord)
    assert record.generations == (1, 3)
    assert world.puts == [first, other, again]
    assert [(request, type(found)) for request, found in world.answers] == [(conflict, ConflictError)]
    assert world.keys() == ()
    assert world.end() == ClearRecord((1, 2, 3))
    assert world.answers[-1] == (cleared, Cleared(3))


def test_a_clear_is_applied_at_once_and_answered_later() -> None:
    world = World()
    world.put("a", "b")
    world.end()
    clear = world.clear("a", "nothing")
    assert (world.keys(), world.answers) == (("b",), [])
    assert world.end() == ClearRecord((1,))
    assert world.answers == [(clear, Cleared(1))]


def test_a_failed_write_changes_nothing_and_frees_the_block() -> None:
    world = World()
    put = world.put("a", data=True)
    error = OutputError("full")
    world.end(error)
    assert (world.keys(), world.answers, world.capacity.used) == ((), [(put, error)], 0)
    world.put("a", data=True)
    world.end()
    assert world.keys() == ("a",)


def test_new_rows_of_a_unit_that_ends_during_the_write_leave_the_journal() -> None:
    world = World()
    world.put("old")
    world.end()
    put = world.put("old", "new", data=True)
    record, _ = world.records[0]
    assert isinstance(record, PutRecord)
    for unit in range(2):
        world.capacity.lose(unit)
    world.end()
    assert isinstance(world.answers[-1][1], PlaneLostError)
    assert world.answers[-1][0] == put
    assert world.keys() == ("old",)
    assert world.end() == ClearRecord((record.generations[1],))


def test_a_wrong_put_is_refused_at_once() -> None:
    world = World()
    world.put("a")
    world.end()
    with pytest.raises(ConflictError):
        world.put("a", expect=(None,))
    assert world.records == []
