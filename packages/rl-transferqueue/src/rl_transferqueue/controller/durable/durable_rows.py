"""Puts and clears that are answered once the journal has them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import xxhash

from rl_protocol.errors import OutputError, PlaneLostError, RLError
from rl_protocol.support.fault_points import FaultPoint, reach
from rl_transferqueue.controller.durable.journal_thread import Done, Found, Read, Wanted
from rl_transferqueue.controller.durable.remote_blocks import Fetched
from rl_transferqueue.controller.durable.row_loads import PAYLOAD, RowLoads
from rl_transferqueue.controller.memory_accounting.capacity import Capacity
from rl_transferqueue.controller.memory_requests import Replies
from rl_transferqueue.controller.rows.block_table import Block as MemoryBlock
from rl_transferqueue.controller.rows.ledger import Ledger
from rl_transferqueue.controller.rows.waiters import Served
from rl_transferqueue.journal.records import Block, ClearRecord, Origin, PutRecord, Record
from rl_transferqueue.transport.control_server import Caller
from rl_transferqueue.wire.arrays import Ints
from rl_transferqueue.wire.header_cache import unpack_header
from rl_transferqueue.wire.messages import Clear, Cleared, Commit
from rl_transferqueue.wire.spans import Span

log = logging.getLogger(__name__)


class RecordStore(Protocol):
    """Where records go to and come from: a `JournalThread`."""

    def write(self, record: Record, done: Done) -> None:
        """Call `done` with None once the record is durable, or with the error that prevented it."""
        ...

    def find(self, generations: Sequence[int], wanted: Wanted, done: Found) -> None:
        """Call `done` with what `Journal.find` returns, or with the error that prevented it."""
        ...

    def read(self, numbers: Sequence[int], done: Read) -> None:
        """Call `done` with what `Journal.read` returns, or with the error that prevented it."""
        ...


class Outcomes(Protocol):
    """What follows from a change of rows."""

    def committed(self, caller: Caller, message: Commit, generations: Ints | range, served: Served) -> None:
        """A put is durable and was applied: answer it, and those whom it serves."""
        ...

    def failed(self, caller: Caller, error: RLError) -> None:
        """A put or a clear has failed after it was taken: answer it."""
        ...

    def cleared(self, served: Served) -> None:
        """Rows were cleared: answer those whom it serves, and free memory."""
        ...

    def gone(self, generations: Sequence[int]) -> None:
        """These rows were cleared, and that is durable."""
        ...

    def freed(self) -> None:
        """Memory became free."""
        ...

    def short(self) -> None:
        """A read began to wait for memory."""
        ...


@dataclass(slots=True)
class _Change:
    """A request that waits for earlier ones on the same rows."""

    caller: Caller
    partition: str
    keys: Sequence[str] | None
    begin: Callable[[], None]


@dataclass(slots=True)
class DurableRows:
    """Writes each put to the journal before it is applied, so that no caller sees a row that a
    crash may lose.

    A clear is applied at once, and answered when it is durable. While a put is being written, other
    puts and clears of its rows wait. Rows can leave memory; they come back from the journal when
    they are read.

    Args:
        ledger, capacity: of the plane.
        journal: takes the records.
        memory: bytes of a span of a unit on the controller's host.
        fetch: `RemoteBlocks.fetch`, for the units of other hosts.
        replies: where errors and answers of clears go.
        outcomes: what follows.
        verify: compare blocks with the digests of their puts; see `drop_damaged` and `elsewhere`.
        keep_origins: have the journal keep the answers to the last puts of each session.

    Attributes:
        damaged: blocks that differed so far.
        loads: of rows that are read while they are on the disk alone; they make room for others.
    """

    ledger: Ledger
    capacity: Capacity
    journal: RecordStore
    memory: Callable[[Span], memoryview]
    fetch: Callable[[Span, int, Fetched], None]
    replies: Replies
    outcomes: Outcomes
    verify: bool = False
    keep_origins: bool = False
    damaged: int = 0
    _busy: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """Keys of the puts that are being written, by partition."""
    _waiting: deque[_Change] = field(default_factory=deque[_Change])
    loads: RowLoads = field(init=False)

    def __post_init__(self) -> None:
        self.ledger.unloads = True
        journal, memory = self.journal, self.memory
        self.loads = RowLoads(
            self.ledger, self.capacity, journal.find, journal.read, memory, self._digest, self.outcomes.short
        )

    def put(self, caller: Caller, message: Commit) -> None:
        """Write a put, whose block the session has reserved.

        The bytes of a block of another host are read first: rows get their generations in the order
        in which the journal has them.

        Raises:
            RLError: as `Ledger.commit` and `Capacity.check`; nothing was changed.
        """
        block = message.block
        if block is None:
            self._begin_put(caller, message, None)
            return
        self.capacity.check(caller.session, block)
        self.capacity.pin(caller.session, block)
        if self.capacity.is_here(block.unit):
            self._begin_put(caller, message, self._payload(block, message.header))
            return

        def fetched(payload: bytearray | RLError) -> None:
            try:
                if isinstance(payload, RLError):
                    self._unpin(caller, message, made=False)
                    raise payload
                self._begin_put(caller, message, payload)
            except RLError as error:
                self.outcomes.failed(caller, error)

        self.fetch(block, unpack_header(message.header).payload, fetched)

    def clear(self, caller: Caller, message: Clear) -> None:
        """Clear rows."""
        self._begin(_Change(caller, message.partition, message.keys, lambda: self._clear(caller, message)))

    def drop_damaged(self, partition: str, keys: Sequence[str], fields: Sequence[str]) -> bool:
        """Compare the blocks with these columns on this host with the digests of their puts. The
        rows of those that differ leave memory, and come back from the journal; returns whether
        there are any."""
        found = False
        for block in self._verified(partition, keys, fields, here=True):
            if self._digest(self._payload(block.ref.span, block.header)) != block.digest:
                self._drop(block)
                found = True
        return found

    def elsewhere(self, partition: str, keys: Sequence[str], fields: Sequence[str]) -> list[MemoryBlock]:
        """The blocks with these columns on other hosts that their units must compare."""
        return self._verified(partition, keys, fields, here=False)

    def drop_different(self, blocks: Sequence[MemoryBlock]) -> None:
        """`drop_damaged` for blocks that differed in the memory of other hosts, unless they have
        been freed since: their memory may be that of another put."""
        for block in blocks:
            if self.ledger.blocks.blocks.get(block.ref.slot) is block:
                self._drop(block)

    def _verified(self, partition: str, keys: Sequence[str], fields: Sequence[str], *, here: bool) -> list[MemoryBlock]:
        blocks = self.ledger.blocks_of(partition, keys, fields) if self.verify else ()
        return [block for block in blocks if block.digest and self.capacity.is_here(block.ref.span.unit) == here]

    def _drop(self, block: MemoryBlock) -> None:
        rows = self.ledger.unload_block(block)
        self.damaged += 1
        log.error(
            "%d rows of partition %r are damaged in the memory of storage unit %d; they are read again from the journal",
            rows,
            block.partition,
            block.ref.span.unit,
        )

    def _payload(self, block: Span, header: bytes) -> memoryview:
        return self.memory(block)[: unpack_header(header).payload]

    def _digest(self, payload: Block) -> bytes:
        """Of the payload of a block; empty: blocks are not verified."""
        return xxhash.xxh3_128_digest(payload) if self.verify else b""

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

    def _begin_put(self, caller: Caller, message: Commit, payload: Block | None) -> None:
        self._begin(_Change(caller, message.partition, message.keys, lambda: self._write(caller, message, payload)))

    def _write(self, caller: Caller, message: Commit, payload: Block | None) -> None:
        ledger, block = self.ledger, message.block
        try:
            first = ledger.prepare(message.partition, message.keys, message.tags, block, message.header, message.expect)
        except RLError:
            self._unpin(caller, message, made=False)
            raise
        generations = ledger.generations(message.partition, message.keys, first)
        digest = self._digest(payload) if payload is not None else b""
        record = PutRecord(
            partition=message.partition,
            keys=message.keys,
            generations=tuple(generations.tolist()),
            header=message.header if payload is not None else b"",
            tags=msgspec.msgpack.encode(message.tags),
            columns={PAYLOAD: payload} if payload is not None else {},
            origin=Origin(*caller) if self.keep_origins else None,
        )
        self._busy.setdefault(message.partition, set()).update(message.keys)
        self.journal.write(record, lambda error: self._written(caller, message, first, generations, digest, error))

    def _written(
        self,
        caller: Caller,
        message: Commit,
        first: int,
        generations: Ints,
        digest: bytes,
        error: OutputError | None,
    ) -> None:
        block = message.block
        kept = error is None and (block is None or self.capacity.runs(block.unit))
        self._unpin(caller, message, made=kept)
        if error is not None:
            self.outcomes.failed(caller, error)
        elif block is not None and not kept:
            fresh = generations[generations >= first].tolist()
            self.journal.write(ClearRecord(tuple(fresh)), lambda _: None)
            what = f"Storage unit {block.unit} of the data plane ended during a put; repeat it."
            self.outcomes.failed(caller, PlaneLostError(what))
        else:
            applied, served = self.ledger.apply(
                message.partition, message.keys, message.tags, block, message.header, first, digest
            )
            if block is not None and self.capacity.is_here(block.unit):
                reach(FaultPoint.ROWS_IN_MEMORY, self._payload(block, message.header)[:1])
            self.outcomes.committed(caller, message, applied, served)
        busy = self._busy[message.partition]
        busy.difference_update(message.keys)
        if not busy:
            del self._busy[message.partition]
        self._begin_waiting()

    def _unpin(self, caller: Caller, message: Commit, *, made: bool) -> None:
        """The put of a block has ended; if it was not `made`, its memory may be free."""
        if message.block is not None:
            self.capacity.unpin(caller.session, message.block, made=made)
            if not made:
                self.outcomes.freed()

    def _clear(self, caller: Caller, message: Clear) -> None:
        generations = tuple(self.ledger.generations(message.partition, message.keys).tolist())
        count, served = self.ledger.clear(message.partition, message.keys)
        self.outcomes.cleared(served)

        def durable(error: OutputError | None) -> None:
            if error is None:
                self.outcomes.gone(generations)
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
                self.outcomes.failed(change.caller, error)
