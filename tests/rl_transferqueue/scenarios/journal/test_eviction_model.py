"""Rows that leave memory and come back, against a plain reference: puts, clears and reads in any
order, while the journal is slow and memory is short."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from controller_fakes import no_fetch
from journal_model import opened
from lossy_disk import LossyDisk
from lossy_files import LossyFiles
from msgspec import msgpack

from rl_protocol import BatchData, dense
from rl_protocol.errors import RLError
from rl_protocol.wire import plan
from rl_transferqueue.controller.durable.durable_rows import DurableRows
from rl_transferqueue.controller.durable.journal_thread import Done, Found, Read, Wanted
from rl_transferqueue.controller.memory_accounting.capacity import Capacity
from rl_transferqueue.controller.rows.ledger import Ledger
from rl_transferqueue.controller.rows.waiters import Served
from rl_transferqueue.journal.disk_journal import DiskJournal
from rl_transferqueue.journal.records import Record
from rl_transferqueue.transport.control_server import Caller
from rl_transferqueue.wire.arrays import Ints
from rl_transferqueue.wire.header_cache import unpack_header
from rl_transferqueue.wire.messages import Answer, Clear, Commit, Located
from rl_transferqueue.wire.spans import Span

SESSION = b"session."
KEYS, FIELDS = "abcdefghij", "xyz"
ALL = 64 * 20
"""Bytes of the plane's memory: twenty blocks of at most three rows and one column. A read needs at
most six columns of rows, in as many blocks."""
STEPS = 400


class World:
    """A plane over a real journal on a simulated disk; `act` does something at random.

    The journal's thread works off `steps`, whose callbacks run later; what a put changes in the
    reference is in `pending` until it is acknowledged. `leases` has what each one must read.
    """

    def __init__(self, rng: random.Random, journal: DiskJournal) -> None:
        self.rng, self.journal = rng, journal
        self.ledger, self.capacity = Ledger(), Capacity(1, ALL)
        self.memory = bytearray(ALL)
        self.steps: deque[Callable[[], Callable[[], None]]] = deque()
        self.callbacks: deque[Callable[[], None]] = deque()
        self.plane = DurableRows(self.ledger, self.capacity, self, self.bytes_of, no_fetch, self, self)
        self.rows: dict[str, dict[str, int]] = {}
        self.pending: dict[int, Callable[[], None]] = {}
        self.leases: dict[int, tuple[Located, tuple[str, ...], dict[str, list[int]]]] = {}
        self.requests = self.reads = self.started = self.loaded = 0

    def bytes_of(self, span: Span) -> memoryview:
        return memoryview(self.memory)[span.offset : span.offset + span.nbytes]

    # the journal's thread
    def write(self, record: Record, done: Done) -> None:
        def step() -> Callable[[], None]:
            self.journal.append([record])
            self.journal.sync()
            return lambda: done(None)

        self.steps.append(step)

    def find(self, generations: Sequence[int], wanted: Wanted, done: Found) -> None:
        def step() -> Callable[[], None]:
            found = self.journal.find(generations, wanted)
            return lambda: done(found)

        self.steps.append(step)

    def read(self, numbers: Sequence[int], done: Read) -> None:
        def step() -> Callable[[], None]:
            columns = self.journal.read(numbers)
            return lambda: done(columns)

        self.steps.append(step)

    # replies and outcomes
    def answer(self, caller: Caller, body: Answer) -> None: ...

    def fail(self, caller: Caller, error: RLError) -> None:
        raise error

    failed = fail

    def committed(self, caller: Caller, message: Commit, generations: Ints | range, served: Served) -> None:
        self.pending.pop(caller.request)()
        self.cleared(served)

    def cleared(self, served: Served) -> None:
        for ref in self.ledger.blocks.take_released():
            self.capacity.give(ref.span)
        self.freed()

    def gone(self, generations: Sequence[int]) -> None: ...

    def freed(self) -> None:
        self.plane.loads.continue_loading()

    def short(self) -> None: ...

    # what happens
    def act(self) -> None:
        deeds = (self.put, self.clear, self.get, self.release, self.squeeze, self.run_journal, self.call_back)
        self.rng.choices(deeds, weights=(4, 1, 4, 4, 2, 6, 6))[0]()

    def put(self) -> None:
        keys, fields = self.rng.sample(KEYS, self.rng.randint(1, 3)), self.rng.sample(FIELDS, self.rng.randint(1, 2))
        self.requests += 1
        columns = {name: np.arange(len(keys)) + 100 * self.requests + 10 * i for i, name in enumerate(fields)}
        header = plan(BatchData({name: dense(values) for name, values in columns.items()}))
        span = self.plane.loads.make_room(lambda: self.capacity.reserve(SESSION, header.payload))
        if span is None:
            return
        for column in header.columns:
            (offset, nbytes), *_ = column.buffers
            self.bytes_of(span)[offset : offset + nbytes] = columns[column.name].tobytes()

        def made() -> None:
            for i, key in enumerate(keys):
                self.rows.setdefault(key, {}).update({name: int(values[i]) for name, values in columns.items()})

        self.pending[self.requests] = made
        self.plane.put(Caller(SESSION, self.requests), Commit("p", tuple(keys), (), None, span, msgpack.encode(header)))

    def clear(self) -> None:
        if not self.pending:  # it would wait for them
            keys = self.rng.sample(KEYS, self.rng.randint(1, 3))
            for key in keys:
                self.rows.pop(key, None)
            self.plane.clear(Caller(SESSION, 0), Clear("p", tuple(keys)))

    def get(self) -> None:
        fields = tuple(self.rng.sample(FIELDS, self.rng.randint(1, 2)))
        there = [key for key in self.rows if self.has([key], fields)]
        keys = tuple(self.rng.sample(there, min(len(there), self.rng.randint(1, 3))))
        if not keys:
            return
        if not self.ledger.on_disk("p", keys, fields).size:
            self.lease(keys, fields)
            return

        def done(error: RLError | None) -> None:
            assert error is None
            self.loaded += 1
            if self.has(keys, fields):  # else they were cleared
                self.lease(keys, fields)

        self.started += 1
        self.plane.loads.start("p", keys, fields, done)

    def has(self, keys: Sequence[str], fields: Sequence[str]) -> bool:
        return all(self.rows.get(key, {}).keys() >= set(fields) for key in keys)

    def lease(self, keys: tuple[str, ...], fields: tuple[str, ...]) -> None:
        self.reads += 1
        located = self.ledger.locate(SESSION, self.reads, "p", keys, fields)
        self.leases[self.reads] = located, fields, {name: [self.rows[key][name] for key in keys] for name in fields}

    def release(self) -> None:
        if self.leases:
            lease = self.rng.choice(list(self.leases))
            del self.leases[lease]
            self.ledger.blocks.release(SESSION, [lease])
            self.cleared([])

    def squeeze(self) -> None:
        """Somebody else needs much memory for a moment."""
        span = self.plane.loads.make_room(lambda: self.capacity.take_here(self.rng.randint(ALL // 8, ALL)))
        if span is not None:
            self.capacity.give(span)
            self.freed()

    def run_journal(self) -> None:
        for _ in range(self.rng.randint(0, len(self.steps))):
            self.callbacks.append(self.steps.popleft()())

    def call_back(self) -> None:
        for _ in range(self.rng.randint(0, len(self.callbacks))):
            self.callbacks.popleft()()

    # what must hold
    def check(self) -> None:
        for located, fields, wanted in self.leases.values():
            assert self.values(located, fields) == wanted
        if not self.pending:
            assert self.capacity.used == self.ledger.blocks.used

    def values(self, located: Located, fields: Sequence[str]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for name, number in zip(fields, located.place_of, strict=True):
            blocks, rows = (np.frombuffer(part, "<i4").tolist() for part in located.places[number])
            found[name] = []
            for block, row in zip(blocks, rows, strict=True):
                header = unpack_header(located.headers[located.header_of[block]])
                (offset, _), *_ = next(it.buffers for it in header.columns if it.name == name)
                at = offset + 8 * row
                found[name].append(int.from_bytes(self.bytes_of(located.blocks[block].span)[at : at + 8], "little"))
        return found

    def finish(self) -> None:
        """Once nothing is leased for long, all puts and reads end."""
        for _ in range(1000):
            if not (self.steps or self.callbacks or self.leases):
                break
            self.release()
            self.run_journal()
            self.call_back()
            self.check()
        assert (self.pending, self.leases, self.started) == ({}, {}, self.loaded)


@pytest.mark.parametrize("seed", range(20))
def test_rows_that_left_memory_come_back_with_their_last_values(seed: int) -> None:
    with opened(LossyFiles(LossyDisk())) as journal:
        journal.recover()
        world = World(random.Random(seed), journal)
        for _ in range(STEPS):
            world.act()
            world.check()
        world.finish()
        assert world.plane.loads.evicted > 20
        assert world.loaded > 10
