"""Rows that leave memory and come back, against a plain reference: puts, clears and reads in any
order, while the journal is slow and memory is short."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from journal_model import opened
from lossy_disk import LossyDisk
from lossy_files import LossyFiles
from msgspec import msgpack

from rl_protocol import BatchData, dense
from rl_protocol.errors import RLError
from rl_protocol.wire import plan
from rl_transferqueue.controller.durable.durable_rows import DurableRows
from rl_transferqueue.controller.durable.journal_thread import Done, Read
from rl_transferqueue.controller.memory_accounting.capacity import Capacity
from rl_transferqueue.controller.rows.ledger import Ledger
from rl_transferqueue.controller.rows.waiters import Served
from rl_transferqueue.journal.records import Record
from rl_transferqueue.transport.control_server import Caller
from rl_transferqueue.wire.arrays import Ints
from rl_transferqueue.wire.header_cache import unpack_header
from rl_transferqueue.wire.messages import Answer, Clear, Commit, Located
from rl_transferqueue.wire.spans import Span

SESSION = b"session."
KEYS = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=3, unique=True)
FIELDS = st.lists(st.sampled_from("xyz"), min_size=1, max_size=2, unique=True)
ALL = 64 * 20
"""Bytes of the plane's memory: twenty blocks of three rows and a column."""


@dataclass(eq=False)
class Get:
    keys: tuple[str, ...]
    fields: tuple[str, ...]
    ended: bool = False


class EvictionMachine(RuleBasedStateMachine):
    """The journal is a real one, on a simulated disk; rules say when its thread takes a step."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.capacity = Ledger(), Capacity(1, ALL)
        self.memory = bytearray(ALL)
        self.journal_opened = opened(LossyFiles(LossyDisk()))
        self.journal = self.journal_opened.__enter__()
        self.journal.recover()
        self.steps: deque[Callable[[], Callable[[], None]]] = deque()
        self.callbacks: deque[Callable[[], None]] = deque()
        self.plane = DurableRows(self.ledger, self.capacity, self, self.bytes_of, self, self)
        self.rows: dict[str, dict[str, int]] = {}
        self.pending: dict[int, Callable[[], None]] = {}
        """What an acknowledged put changes."""
        self.gets: list[Get] = []
        self.leases: dict[int, tuple[Located, tuple[str, ...], dict[str, list[int]]]] = {}
        self.value = self.last_lease = self.requests = 0

    def teardown(self) -> None:
        self.journal_opened.__exit__(None, None, None)

    def bytes_of(self, span: Span) -> memoryview:
        return memoryview(self.memory)[span.offset : span.offset + span.nbytes]

    # the journal's thread
    def write(self, record: Record, done: Done) -> None:
        def step() -> Callable[[], None]:
            self.journal.append([record])
            self.journal.sync()
            return lambda: done(None)

        self.steps.append(step)

    def read(self, generations: Sequence[int], done: Read) -> None:
        def step() -> Callable[[], None]:
            found = self.journal.read(generations)
            return lambda: done(found)

        self.steps.append(step)

    # replies and outcomes
    def answer(self, caller: Caller, body: Answer) -> None: ...

    def fail(self, caller: Caller, error: RLError) -> None:
        raise error

    failed = fail

    def committed(self, caller: Caller, message: Commit, generations: Ints | range, served: Served) -> None:
        self.pending.pop(caller.request)()
        self.settle()

    def cleared(self, served: Served) -> None:
        self.settle()

    def gone(self, generations: Sequence[int]) -> None: ...

    def freed(self) -> None:
        self.plane.loads.continue_loading()

    def short(self) -> None: ...

    def settle(self) -> None:
        """What `BlockCleanup` does."""
        for ref in self.ledger.blocks.take_released():
            self.capacity.give(ref.span)
        self.freed()

    # -- rules
    @rule(keys=KEYS, fields=FIELDS)
    def put(self, keys: list[str], fields: list[str]) -> None:
        columns = {name: np.arange(len(keys)) + self.value + 100 * i for i, name in enumerate(fields)}
        self.value += 1000
        header = plan(BatchData({name: dense(values) for name, values in columns.items()}))
        span = self.plane.loads.make_room(lambda: self.capacity.reserve(SESSION, header.payload))
        if span is None:
            return
        for column in header.columns:
            (offset, nbytes), *_ = column.buffers
            self.bytes_of(span)[offset : offset + nbytes] = columns[column.name].tobytes()
        self.requests += 1

        def made() -> None:
            for i, key in enumerate(keys):
                self.rows.setdefault(key, {}).update({name: int(values[i]) for name, values in columns.items()})

        self.pending[self.requests] = made
        self.plane.put(Caller(SESSION, self.requests), Commit("p", tuple(keys), (), None, span, msgpack.encode(header)))

    @precondition(lambda self: not self.pending)  # it would wait for puts
    @rule(keys=KEYS)
    def clear(self, keys: list[str]) -> None:
        self.requests += 1
        for key in keys:
            self.rows.pop(key, None)
        self.plane.clear(Caller(SESSION, self.requests), Clear("p", tuple(keys)))

    @rule(keys=KEYS, fields=FIELDS)
    def get(self, keys: list[str], fields: list[str]) -> None:
        if not all(name in self.rows.get(key, ()) for key in keys for name in fields):
            return
        get = Get(tuple(keys), tuple(fields))
        if not self.ledger.on_disk("p", keys, fields).size:
            self.locate(get)
            return
        self.gets.append(get)
        self.plane.loads.start("p", get.keys, get.fields, lambda error: self.loaded(get, error))

    @rule(which=st.integers(0, 5))
    def release(self, which: int) -> None:
        lease = next(iter(list(self.leases)[which:]), None)
        if lease is not None:
            del self.leases[lease]
            self.ledger.blocks.release(SESSION, [lease])
            self.settle()

    @precondition(lambda self: self.steps)
    @rule()
    def journal_step(self) -> None:
        self.callbacks.append(self.steps.popleft()())

    @precondition(lambda self: self.callbacks)
    @rule()
    def call_back(self) -> None:
        self.callbacks.popleft()()

    @rule(keys=KEYS)
    def unload(self, keys: list[str]) -> None:
        self.ledger.unload("p", keys)
        self.settle()

    @rule()
    def finish(self) -> None:
        """Once nothing is leased, every read ends."""
        while self.leases:
            self.release(0)
        while self.steps or self.callbacks:
            while self.steps:
                self.journal_step()
            self.call_back()
            while self.leases:
                self.release(0)
        assert not self.gets
        assert not self.pending

    def loaded(self, get: Get, error: RLError | None) -> None:
        assert error is None
        self.gets.remove(get)
        if all(name in self.rows.get(key, ()) for key in get.keys for name in get.fields):
            self.locate(get)

    def locate(self, get: Get) -> None:
        """Lease the rows; they have the values of their last puts."""
        self.last_lease += 1
        located = self.ledger.locate(SESSION, self.last_lease, "p", get.keys, get.fields)
        wanted = {name: [self.rows[key][name] for key in get.keys] for name in get.fields}
        assert self.read_columns(located, get.fields) == wanted
        self.leases[self.last_lease] = located, get.fields, wanted

    def read_columns(self, located: Located, fields: Sequence[str]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for name, place in zip(fields, located.place_of, strict=True):
            found[name] = []
            for block, row in zip(
                *(np.frombuffer(part, "<i4").tolist() for part in located.places[place]), strict=True
            ):
                header = unpack_header(located.headers[located.header_of[block]])
                (offset, _), *_ = next(it.buffers for it in header.columns if it.name == name)
                at = self.bytes_of(located.blocks[block].span)[offset + 8 * row : offset + 8 * row + 8]
                found[name].append(int.from_bytes(at, "little"))
        return found

    @invariant()
    def leased_rows_do_not_change(self) -> None:
        for located, fields, wanted in self.leases.values():
            assert self.read_columns(located, fields) == wanted

    @invariant()
    def no_memory_is_lost(self) -> None:
        if not self.pending:
            assert self.capacity.used == self.ledger.blocks.used


EvictionMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
test_rows_leave_memory_and_come_back_with_their_last_values = EvictionMachine.TestCase
