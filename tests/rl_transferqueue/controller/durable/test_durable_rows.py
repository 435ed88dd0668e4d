"""Durable puts and clears over a journal whose writes end when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from rl_protocol import BatchData, BatchError, ConflictError, OutputError, dense
from rl_protocol.errors import CapacityTimeout, PlaneLostError, PlaneTimeout, RLError
from rl_protocol.wire import plan
from rl_transferqueue.controller.durable import row_loads
from rl_transferqueue.controller.durable.durable_rows import PAYLOAD, DurableRows
from rl_transferqueue.controller.durable.journal_thread import Done, Found, Read, Wanted
from rl_transferqueue.controller.durable.remote_blocks import Fetched
from rl_transferqueue.controller.memory_accounting.capacity import Capacity
from rl_transferqueue.controller.memory_accounting.occupancy import Occupancy
from rl_transferqueue.controller.rows.ledger import Ledger
from rl_transferqueue.controller.rows.waiters import Served
from rl_transferqueue.journal.records import Block, ClearRecord, FoundPut, PutRecord, Record
from rl_transferqueue.transport.control_server import Caller
from rl_transferqueue.wire.arrays import Ints
from rl_transferqueue.wire.messages import Answer, Clear, Cleared, Commit, TagColumn
from rl_transferqueue.wire.spans import Span

SESSION = b"session1"


class World:
    """The collaborators of `DurableRows`, which record what they are told."""

    def __init__(self, *, verify: bool = False) -> None:
        self.ledger, self.capacity = Ledger(), Capacity(2, 4096, "here")
        self.memory = {unit: bytearray(4096) for unit in range(2)}
        self.records: list[tuple[Record, Done]] = []
        self.reads: list[tuple[list[int], Callable[[Sequence[PutRecord] | OutputError], None]]] = []
        self.read_at_once: list[list[int]] = []
        self.stored: dict[int, Mapping[str, Block]] = {}
        self.answers: list[tuple[int, Answer | RLError]] = []
        self.puts: list[int] = []
        self.gone_rows: list[int] = []
        self.requests = self.times_short = 0
        self.fetches: list[Fetched] = []
        self.rows = DurableRows(self.ledger, self.capacity, self, self.bytes_of, self.fetch, self, self, verify=verify)

    def bytes_of(self, span: Span) -> memoryview:
        return memoryview(self.memory[span.unit])[span.offset : span.offset + span.nbytes]

    def fetch(self, block: Span, nbytes: int, fetched: Fetched) -> None:
        assert not self.capacity.is_here(block.unit)
        self.fetches.append(fetched)

    # the journal
    def write(self, record: Record, done: Done) -> None:
        self.records.append((record, done))

    def find(self, generations: Sequence[int], wanted: Wanted, done: Found) -> None:
        """A test ends it with the puts that the journal has, oldest first; it can't read those that
        have no columns."""

        def end(puts: Sequence[PutRecord] | OutputError) -> None:
            if isinstance(puts, OutputError):
                done(puts)
                return
            numbers = range(len(self.stored), len(self.stored) + len(puts))
            sizes = [sum(memoryview(column).nbytes for column in it.columns.values()) for it in puts]
            self.stored.update(zip(numbers, (it.columns for it in puts), strict=True))
            done(tuple(FoundPut(numbers[i], it, sizes[i], tuple(puts[i + 1 :])) for i, it in enumerate(puts)))

        self.reads.append((list(generations), end))

    def read(self, numbers: Sequence[int], done: Read) -> None:
        self.read_at_once.append(list(numbers))
        done({number: self.stored[number] or None for number in numbers})

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

    def failed(self, caller: Caller, error: RLError) -> None:
        self.fail(caller, error)

    def cleared(self, served: Served) -> None: ...

    def gone(self, generations: Sequence[int]) -> None:
        self.gone_rows += generations

    def freed(self) -> None: ...

    def short(self) -> None:
        self.times_short += 1

    # requests
    def put(
        self,
        *keys: str,
        n: int = 0,
        data: bool = False,
        expect: tuple[Mapping[str, int] | None, ...] | None = None,
        host: str = "here",
    ) -> int:
        self.requests += 1
        message = Commit("p", keys, (TagColumn("n", (n,) * len(keys)),), expect)
        if data:
            batch = BatchData({"x": dense(np.arange(len(keys)) + n)})
            header = plan(batch)
            span = self.capacity.reserve(SESSION, header.payload, host)
            assert span is not None
            if self.capacity.is_here(span.unit):
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


def test_memory_of_a_waiting_put_is_not_reserved_again_when_its_caller_leaves() -> None:
    world = World()
    world.put("a", n=1)
    late = world.put("a", n=2, data=True)
    world.capacity.abandon(SESSION, Span(1, 0, 64))
    taken = [world.capacity.reserve(SESSION, 4096) for _ in range(2)]
    assert taken == [Span(0, 0, 4096), None]
    world.end()
    world.end()
    assert world.puts[-1] == late
    assert places(world, "a") == [2]


def test_memory_of_a_put_that_waited_and_was_refused_is_free_when_its_caller_has_left() -> None:
    world = World()
    world.put("a")
    refused = world.put("a", data=True, expect=(None,))
    world.capacity.abandon(SESSION, Span(1, 0, 64))
    world.end()
    assert [(request, type(found)) for request, found in world.answers] == [(refused, ConflictError)]
    assert world.capacity.used == 0


def test_a_clear_is_applied_at_once_and_answered_later() -> None:
    world = World()
    world.put("a", "b")
    world.end()
    clear = world.clear("a", "nothing")
    assert (world.keys(), world.answers, world.gone_rows) == (("b",), [], [])
    assert world.end() == ClearRecord((1,))
    assert (world.answers, world.gone_rows) == ([(clear, Cleared(1))], [1])


@pytest.mark.parametrize("leaves", ["after the answer", "before"])
def test_a_failed_write_changes_nothing_and_its_session_frees_the_block(leaves: str) -> None:
    world = World()
    put = world.put("a", data=True)
    error = OutputError("full")
    if leaves == "before":
        world.capacity.abandon(SESSION, Span(1, 0, 64))
        assert world.capacity.used == 64, "the journal reads it"
    world.end(error)
    assert (world.keys(), world.answers) == ((), [(put, error)])
    if leaves == "after the answer":
        assert world.capacity.holders() == {SESSION: 64}, "no other put gets it before"
        world.capacity.abandon(SESSION, Span(1, 0, 64))
    assert world.capacity.used == 0
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


def recorded(world: World) -> PutRecord:
    """End the oldest write, and return the put with its bytes, as the journal has it."""
    record = world.end()
    assert isinstance(record, PutRecord)
    return replace(record, columns={name: bytes(block) for name, block in record.columns.items()})


def places(world: World, *keys: str) -> list[int]:
    """The values of x where the rows lie now."""
    located = world.ledger.locate(SESSION, len(world.answers) + 100, "p", keys, ("x",))
    (blocks, rows), *_ = located.places
    pairs = zip(np.frombuffer(blocks, "<i4").tolist(), np.frombuffer(rows, "<i4").tolist(), strict=True)
    return [world.bytes_of(located.blocks[block].span)[8 * row] for block, row in pairs]


def test_rows_leave_memory_and_come_back_with_their_newest_columns() -> None:
    world = World()
    world.put("a", "b", n=7, data=True)
    older = recorded(world)
    world.put("b", n=9, data=True)
    newer = recorded(world)
    world.ledger.unload("p", ["a", "b", "unknown"])
    for ref in world.ledger.blocks.take_released():
        world.capacity.give(ref.span)
    assert (world.capacity.used, world.ledger.blocks.used) == (0, 0)
    assert world.ledger.list_rows("p", {}, ["x"]).keys == ("a", "b"), "they still have the column"
    away = world.ledger.on_disk("p", ["a", "b"], ["x"])
    assert away.tolist() == [1, 2]

    ended: list[RLError | None] = []
    world.rows.loads.start("p", ("a", "b"), ("x",), ended.append)
    (wanted, done), *_ = world.reads
    assert (wanted, ended) == ([1, 2], [])
    done((older, newer))
    assert ended == [None]
    assert places(world, "a", "b") == [7, 9]
    assert not world.ledger.on_disk("p", ["a", "b"], ["x"]).size


def test_rows_that_are_damaged_in_memory_come_back_from_the_journal() -> None:
    world = World(verify=True)
    world.put("a", "b", n=7, data=True)
    whole = recorded(world)
    world.put("c", n=9, data=True)
    recorded(world)
    assert not world.rows.drop_damaged("p", ["a", "b", "c", "unknown"], ["x"])

    (block,) = world.ledger.blocks_of("p", ["b"], ["x"])
    world.bytes_of(block.ref.span)[3] ^= 0x10
    assert not world.rows.drop_damaged("p", ["c"], ["x"]), "it is in another block"
    assert world.rows.drop_damaged("p", ["b"], ["x"])
    assert world.rows.damaged == 1
    assert world.ledger.on_disk("p", ["a", "b", "c"], ["x"]).tolist() == [1, 2], "they share the damaged block"

    world.rows.loads.start("p", ("b",), ("x",), lambda _: None)
    world.reads[0][1]((whole,))
    assert places(world, "a", "b", "c") == [7, 0, 9], "the first eight bytes of each put are n"
    (again,) = world.ledger.blocks_of("p", ["a"], ["x"])
    world.bytes_of(again.ref.span)[0] ^= 1
    assert world.rows.drop_damaged("p", ["a"], ["x"]), "blocks from the journal are verified as well"
    assert world.rows.damaged == 2


def test_blocks_are_not_compared_unless_that_is_asked_for() -> None:
    world = World()
    world.put("a", n=7, data=True)
    recorded(world)
    (block,) = world.ledger.blocks_of("p", ["a"], ["x"])
    world.bytes_of(block.ref.span)[3] ^= 0x10
    assert not world.rows.drop_damaged("p", ["a"], ["x"])


def test_a_load_waits_for_memory_and_goes_before_puts() -> None:
    world = World()
    world.put("a", n=7, data=True)
    record = recorded(world)
    world.ledger.unload("p", ["a"])
    for ref in world.ledger.blocks.take_released():
        world.capacity.give(ref.span)
    full = [world.capacity.take(unit, 4096) for unit in range(2)]
    ended: list[RLError | None] = []
    world.rows.loads.start("p", ("a",), ("x",), ended.append)
    world.reads[0][1]((record,))
    assert ended == []
    assert full[1] is not None
    world.capacity.give(full[1])
    world.rows.loads.continue_loading()
    assert (ended, places(world, "a")) == ([None], [7])


def test_a_load_that_was_left_does_not_hold_up_others() -> None:
    world = World()
    records: list[PutRecord] = []
    for key in "abc":
        world.put(key, n=7, data=True)
        records.append(recorded(world))
    world.ledger.unload("p", ["a", "b", "c"])
    for ref in world.ledger.blocks.take_released():
        world.capacity.give(ref.span)
    blocks = [world.capacity.take(unit, 4096 - 64 * (unit == 1)) for unit in range(2)]
    assert None not in blocks
    ended: list[tuple[str, RLError | None]] = []
    loads = world.rows.loads
    first = loads.start("p", ("a", "b"), ("x",), lambda error: ended.append(("first", error)))
    unread = loads.start("p", ("c",), ("x",), lambda error: ended.append(("unread", error)))
    loads.start("p", ("c",), ("x",), lambda error: ended.append(("last", error)))
    world.reads[0][1]((records[0], replace(records[1], columns={PAYLOAD: bytes(128)})))
    world.reads[2][1]((records[2],))
    assert ended == []
    held = Occupancy(partitions={}, reserved={}, read={}, waiting=0, waiting_bytes=0)
    assert isinstance(loads.late(unread, "p", 1.0, held), PlaneTimeout)
    late = loads.late(first, "p", 1.0, held)
    assert isinstance(late, CapacityTimeout)
    assert "needs 128 bytes in one piece for the next of 2 puts (192 bytes in all)" in str(late)
    assert "storage unit 1 holds 4032 of 4096 bytes (64 free, 64 in one piece), storage unit 0 holds 4096" in str(late)
    loads.leave(first)
    loads.leave(unread)
    loads.continue_loading()
    world.reads[1][1]((records[2],))
    assert (ended, places(world, "c")) == ([("last", None)], [7])


def test_rows_that_were_cleared_while_they_were_read_stay_away() -> None:
    world = World()
    world.put("a", n=7, data=True)
    record = recorded(world)
    world.ledger.unload("p", ["a"])
    for ref in world.ledger.blocks.take_released():
        world.capacity.give(ref.span)
    ended: list[RLError | None] = []
    world.rows.loads.start("p", ("a",), ("x",), ended.append)
    world.clear("a")
    world.reads[0][1]((record,))
    assert (ended, world.capacity.used) == ([None], 0)


def test_a_load_that_can_never_fit_fails() -> None:
    world = World()
    world.put("a", data=True)
    record = replace(recorded(world), columns={PAYLOAD: bytes(5000)})
    world.ledger.unload("p", ["a"])
    ended: list[RLError | None] = []
    world.rows.loads.start("p", ("a",), ("x",), ended.append)
    world.reads[0][1]((record,))
    assert "raise TransferQueueConfig.capacity_mb" in str(ended[0])
    world.rows.loads.start("p", ("a",), ("x",), ended.append)
    world.reads[1][1](OutputError("broken"))
    assert str(ended[1]) == "broken"


def unloaded(world: World, keys: str, nbytes: int) -> list[PutRecord]:
    """A put of `nbytes` bytes for each key, which only the journal has."""
    records: list[PutRecord] = []
    for n, key in enumerate(keys, start=1):
        world.put(key, n=n, data=True)
        records.append(replace(recorded(world), columns={PAYLOAD: bytes([n]) * nbytes}))
    world.ledger.unload("p", list(keys))
    for ref in world.ledger.blocks.take_released():
        world.capacity.give(ref.span)
    return records


def test_a_load_reads_a_few_puts_at_a_time_and_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_loads, "READ_BYTES", 1024)
    world = World()
    records = unloaded(world, "abcdef", 512)
    records[2] = replace(records[2], columns={PAYLOAD: bytes([3]) * 1600})
    ended: list[RLError | None] = []
    world.rows.loads.start("p", tuple("abcde"), ("x",), ended.append)
    world.rows.loads.start("p", ("f",), ("x",), ended.append)
    world.reads[1][1](records[5:])
    assert world.read_at_once == [], "the first load is not done"
    world.reads[0][1](records[:5])
    sizes = [[len(world.stored[number][PAYLOAD]) for number in numbers] for numbers in world.read_at_once]
    assert sizes == [[512, 512], [1600], [512, 512], [512]]
    assert (ended, places(world, *"abcdef")) == ([None, None], [1, 2, 3, 4, 5, 6])


def test_a_load_of_more_bytes_than_the_plane_has_fails_before_anything_is_read() -> None:
    world = World()
    records = unloaded(world, "abc", 3000)
    ended: list[RLError | None] = []
    world.rows.loads.start("p", tuple("abc"), ("x",), ended.append)
    world.reads[0][1](records)
    assert isinstance(ended[0], BatchError)
    assert "A read of 3 rows of partition 'p'" in str(ended[0])
    assert "needs 9024 bytes of memory for 3 puts" in str(ended[0])
    assert "the storage units on the controller's host have 8192. Read fewer rows at a time" in str(ended[0])
    assert (world.read_at_once, world.capacity.used) == ([], 0)
    world.rows.loads.start("p", tuple("ab"), ("x",), ended.append)
    world.reads[1][1](records[:2])
    assert (ended[1], places(world, "a", "b")) == (None, [1, 2])


def with_another_host(*, verify: bool = False) -> World:
    """It has unit 2."""
    world = World(verify=verify)
    world.capacity.join(2, "there")
    return world


@pytest.mark.parametrize("verify", [False, True])
def test_the_journal_gets_the_bytes_of_a_unit_of_another_host_before_the_put_is_made(verify: bool) -> None:
    world = with_another_host(verify=verify)
    put = world.put("a", n=7, data=True, host="there")
    world.put("b", data=True)
    assert [it[0].keys for it in world.records if isinstance(it[0], PutRecord)] == [("b",)]
    world.end()
    assert world.puts == [put + 1]
    world.fetches[0](bytearray(b"payload"))
    record = world.end()
    assert isinstance(record, PutRecord)
    assert (record.keys, record.generations, dict(record.columns)) == (("a",), (2,), {PAYLOAD: b"payload"})
    assert world.puts == [put + 1, put]
    assert not world.rows.drop_damaged("p", ["a"], ["x"]), "its unit looks at memory of another host"
    assert [block.ref.span.unit for block in world.rows.elsewhere("p", ["a", "b"], ["x"])] == [2] * verify


def test_rows_that_are_damaged_on_another_host_are_on_the_disk_alone_unless_they_are_gone() -> None:
    world = with_another_host(verify=True)
    for key in "ab":
        world.put(key, n=7, data=True, host="there")
        world.fetches.pop()(bytearray(b"payload"))
        recorded(world)
    blocks = world.rows.elsewhere("p", ["a", "b"], ["x"])
    assert {block.digest for block in blocks} == {xxhash.xxh3_128_digest(b"payload")}
    world.ledger.clear("p", ["b"])
    world.rows.drop_different(blocks)
    assert world.rows.damaged == 1, "the memory of a block that was cleared may be another's"
    assert world.ledger.on_disk("p", ["a"], ["x"]).tolist() == [1]
    assert world.rows.elsewhere("p", ["a"], ["x"]) == []


def test_a_put_whose_bytes_can_not_be_read_from_another_host_fails_and_frees_its_memory() -> None:
    world = with_another_host()
    put = world.put("a", data=True, host="there")
    lost = PlaneLostError("gone")
    world.fetches[0](lost)
    assert world.answers == [(put, lost)]
    assert world.capacity.reserved(SESSION, 2)
    assert (world.puts, world.keys(), world.records) == ([], (), [])
    again = world.put("a", data=True, host="there", expect=({"n": 1},))
    world.fetches[1](bytearray(64))
    assert isinstance(world.answers[-1][1], ConflictError)
    assert world.answers[-1][0] == again


def test_rows_of_the_journal_are_read_into_units_of_this_host_alone() -> None:
    """The unit of the other host is empty, and a row there, which was used before, stays."""
    world = with_another_host()
    world.put("there", data=True, host="there")
    world.fetches[0](bytearray(b"there"))
    world.end()
    world.put("old", data=True)
    world.end()
    world.put("a", n=7, data=True)
    record = recorded(world)
    world.ledger.unload("p", ["a"])
    for ref in world.ledger.blocks.take_released():
        world.capacity.give(ref.span)
    for unit in range(2):
        assert world.capacity.take(unit, 4096 - 64 * (unit == world.ledger.blocks.blocks[2].ref.span.unit))
    ended: list[RLError | None] = []
    world.rows.loads.start("p", ("a",), ("x",), ended.append)
    world.reads[0][1]((record,))
    assert (ended, places(world, "a")) == ([None], [7])
    assert in_memory(world, "there", "old", "a") == {"there", "a"}


def test_without_units_on_this_host_a_load_fails() -> None:
    world = with_another_host()
    world.put("a", data=True)
    record = recorded(world)
    world.ledger.unload("p", ["a"])
    for unit in range(2):
        world.capacity.lose(unit)
    ended: list[RLError | None] = []
    world.rows.loads.start("p", ("a",), ("x",), ended.append)
    world.reads[0][1]((record,))
    assert isinstance(ended[0], PlaneLostError)


def test_rows_of_a_unit_that_has_ended_are_on_the_disk_alone() -> None:
    """Also those that a reader holds; no other row is touched."""
    world = World()
    for key in "abcd":
        world.put(key, n=7, data=True)
        recorded(world)
    world.ledger.locate(SESSION, 1, "p", ("a",), ("x",))
    gone = world.ledger.blocks.blocks[1].ref.span.unit
    there = {
        key for key in "abcd" if world.ledger.locate(SESSION, ord(key), "p", (key,), ("x",)).blocks[0].span.unit == gone
    }
    world.capacity.lose(gone)
    assert world.ledger.lose_unit(gone) == []
    assert in_memory(world, *"abcd") == set("abcd") - there
    assert "a" in there
    assert len(there) == 2
    assert world.ledger.contents().lost == {}
    assert world.keys() == ("a", "b", "c", "d")


def room_for(world: World, nbytes: int) -> Span | None:
    return world.rows.loads.make_room(lambda: world.capacity.take_here(nbytes))


def in_memory(world: World, *keys: str) -> set[str]:
    return {key for key in keys if not world.ledger.on_disk("p", [key], ["x"]).size}


def test_rows_that_were_used_longest_ago_leave_memory_first() -> None:
    """Both units are full: 64 bytes per row, and one range each."""
    world = World()
    for key in "abcd":
        world.put(key, n=7, data=True)
        recorded(world)
    world.ledger.locate(SESSION, 1, "p", ("a",), ("x",))
    world.ledger.locate(SESSION, 2, "p", ("c",), ("x",))
    world.ledger.blocks.release(SESSION, [1])
    assert all(world.capacity.take(unit, 4096 - 128) for unit in range(2))
    left = list[set[str]]()
    for _ in range(3):
        assert room_for(world, 64) is not None
        left.append({"a", "b", "c", "d"} - in_memory(world, *"abcd"))
    assert left == [{"b"}, {"b", "d"}, {"a", "b", "d"}], "a was used after b and d, and c is being read"
    assert room_for(world, 64) is None
    world.ledger.blocks.release(SESSION, [2])
    assert room_for(world, 64) is not None
    assert (in_memory(world, *"abcd"), world.rows.loads.evicted) == (set(), 4)


class Counted(np.ndarray[tuple[int, ...], np.dtype[np.int32]]):
    """An array that counts the elements that were read or compared."""

    seen = 0

    def __getitem__(self, at: Any) -> Any:
        found = self.view(np.ndarray)[at]
        Counted.seen += np.size(found)
        return found

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **how: Any) -> Any:
        plain = [it.view(np.ndarray) if isinstance(it, Counted) else it for it in inputs]
        Counted.seen += sum(it.size for it in inputs if isinstance(it, Counted))
        return getattr(ufunc, method)(*plain, **how)


@pytest.mark.parametrize("others", [0, 30, 3000])
def test_what_leaves_memory_is_found_without_looking_at_other_rows(others: int) -> None:
    """Three blocks of two rows leave memory; no other row has a column there."""
    world = World()
    for key in "abc":
        world.put(key, f"{key}2", n=ord(key), data=True)
        recorded(world)
    if others:
        world.put(*(f"other{i}" for i in range(others)))
        recorded(world)
    world.put("a", n=7)  # a change that moves no column
    recorded(world)
    cells = world.ledger._partitions.get("p").columns.cells["x"]
    cells.block = cells.block.view(Counted)
    assert all(world.capacity.take(unit, 4096 - blocks) for unit, blocks in enumerate((64, 128)))
    Counted.seen = 0
    for _ in range(3):
        assert room_for(world, 64) is not None
    assert world.rows.loads.evicted == 3
    assert Counted.seen == 3 * 2 * 3  # each row is compared, compared again when it leaves, and read


def test_only_what_lies_in_a_block_leaves_memory_with_it() -> None:
    world = World()
    world.put("a", "b", n=7, data=True)
    recorded(world)
    world.put("b", n=9, data=True)
    recorded(world)
    world.ledger.locate(SESSION, 1, "p", ("b",), ("x",))
    assert room_for(world, 4096) is not None
    assert room_for(world, 4096) is None
    assert in_memory(world, "a", "b") == {"b"}
    assert places(world, "b") == [9]


def test_a_load_keeps_its_own_rows_in_memory_and_reads_again_what_left_before() -> None:
    world = World()
    records: list[PutRecord] = []
    for key in "abc":
        world.put(key, n=ord(key), data=True)
        records.append(recorded(world))
    full = [world.capacity.take(unit, 4096 - 64 * (1 + unit)) for unit in range(2)]
    world.ledger.unload("p", ["b"])
    for ref in world.ledger.blocks.take_released():
        world.capacity.give(ref.span)
    assert room_for(world, 64) is not None, "b's memory is used by others"
    ended: list[RLError | None] = []
    world.rows.loads.start("p", ("a", "b", "c"), ("x",), ended.append)
    world.ledger.locate(SESSION, 1, "p", ("c",), ("x",))
    assert room_for(world, 64) is None, "a is kept for the load, and c by a lease"
    world.reads[0][1]((records[1],))
    world.rows.loads.continue_loading()
    assert (ended, world.times_short) == ([], 1)
    assert in_memory(world, "a", "b", "c") == {"a", "c"}

    world.ledger.unload("p", ["a"])  # as another client may
    for ref in world.ledger.blocks.take_released():
        world.capacity.give(ref.span)
    world.rows.loads.continue_loading()
    assert (ended, [asked for asked, _ in world.reads]) == ([], [[2], [1]])
    assert full[0] is not None
    world.capacity.give(full[0])
    world.reads[1][1]((records[0],))
    assert ended == [None]
    assert places(world, "a", "b", "c") == [ord(key) for key in "abc"]


def test_a_row_that_is_put_again_while_it_is_read_from_the_journal_keeps_its_new_column() -> None:
    world = World()
    world.put("a", n=7, data=True)
    older = recorded(world)
    world.ledger.unload("p", ["a"])
    ended: list[RLError | None] = []
    world.rows.loads.start("p", ("a",), ("x",), ended.append)
    world.put("a", n=9, data=True)
    newer = recorded(world)
    world.ledger.unload("p", ["a"])
    world.reads[0][1]((older,))
    assert (ended, in_memory(world, "a")) == ([], set())
    world.reads[1][1]((older, newer))
    assert ended == [None]
    assert places(world, "a") == [9]


def test_a_read_loads_no_put_but_those_of_its_rows() -> None:
    """b is in two puts, of which the later one has c, too."""
    world = World()
    world.put("a", "b", n=7, data=True)
    older = recorded(world)
    world.put("b", "c", n=9, data=True)
    newer = recorded(world)
    world.ledger.unload("p", ["a", "b", "c"])
    for ref in world.ledger.blocks.take_released():
        world.capacity.give(ref.span)
    ended: list[RLError | None] = []
    world.rows.loads.start("p", ("a",), ("x",), ended.append)
    world.reads[0][1]((older, replace(newer, columns={})))
    assert (ended, in_memory(world, *"abc"), world.capacity.used) == ([None], {"a"}, 64)
    world.rows.loads.start("p", ("b",), ("x",), ended.append)
    world.reads[1][1]((older, newer))
    assert (ended, in_memory(world, *"abc"), world.capacity.used) == ([None, None], {"a", "b", "c"}, 128)
    assert places(world, "a", "b") == [7, 9]


def test_a_put_that_is_damaged_in_the_journal_is_not_replaced_by_an_older_one() -> None:
    world = World()
    world.put("a", n=7, data=True)
    older = recorded(world)
    world.put("a", n=9, data=True)
    newer = recorded(world)
    world.ledger.unload("p", ["a"])
    ended: list[RLError | None] = []
    world.rows.loads.start("p", ("a",), ("x",), ended.append)
    world.reads[0][1]((older, replace(newer, columns={})))
    assert (ended, in_memory(world, "a")) == ([None], set())
