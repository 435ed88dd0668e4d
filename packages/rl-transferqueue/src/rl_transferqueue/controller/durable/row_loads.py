"""Rows that are read from the journal into memory, and those that leave memory for them.

All blocks are in the journal, so a block that no lease holds can leave memory. Columns of a row
that changed while the journal was read are read again: they may be older than the row. The first
load reads its puts a few at a time and the others wait for it, so reads need little memory besides
that of the storage units.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from rl_protocol.errors import BatchError, CapacityTimeout, OutputError, PlaneTimeout, RLError
from rl_transferqueue.controller.durable.journal_thread import Found, Read, Wanted
from rl_transferqueue.controller.memory_accounting.capacity import Capacity
from rl_transferqueue.controller.memory_accounting.occupancy import Occupancy
from rl_transferqueue.controller.rows.ledger import Ledger
from rl_transferqueue.journal.records import Block, FoundPut, PutRecord
from rl_transferqueue.wire.arrays import Ints
from rl_transferqueue.wire.header_cache import unpack_header
from rl_transferqueue.wire.spans import Span, rounded

Loaded: TypeAlias = Callable[[RLError | None], None]
PAYLOAD = "payload"
"""Name of a put's block in its record."""
READ_BYTES = 16 << 20
"""Bytes of puts that are read from the journal at a time; a larger put is read alone."""


@dataclass(eq=False, slots=True)
class RowLoad:
    """One request for columns of rows of which the journal alone has some."""

    partition: str
    keys: Sequence[str]
    fields: Sequence[str]
    done: Loaded
    asked: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """Generations that the journal was asked for ..."""
    since: int = 0
    """... in this version of the ledger."""
    puts: list[FoundPut] | None = None
    """Puts that are not loaded yet; None: they are still being looked up."""
    payloads: dict[int, Block | None] = field(default_factory=dict[int, Block | None])
    """By number, of those that were read; None: damaged."""
    reading: bool = False
    """Payloads are being read."""
    left: bool = False
    """Its caller no longer waits for it."""
    short: bool = False
    """It waits for memory."""


@dataclass(slots=True)
class RowLoads:
    """Loads by arrival; the first one waits for memory, and the others for it.

    Args:
        ledger, capacity: of the plane.
        find, read: `Journal.find` and `Journal.read` in the journal's thread.
        memory: bytes of a span.
        digest: of the payload of a block, see `Block`.
        on_short: called when a load begins to wait for memory.

    Attributes:
        evicted: blocks that left memory for others so far.
    """

    ledger: Ledger
    capacity: Capacity
    find: Callable[[Sequence[int], Wanted, Found], None]
    read: Callable[[Sequence[int], Read], None]
    memory: Callable[[Span], memoryview]
    digest: Callable[[memoryview], bytes]
    on_short: Callable[[], None]
    evicted: int = 0
    _waiting: deque[RowLoad] = field(default_factory=deque[RowLoad])

    @property
    def short(self) -> bool:
        """Whether the first load waits for memory."""
        return bool(self._waiting) and self._waiting[0].short

    def start(self, partition: str, keys: Sequence[str], fields: Sequence[str], done: Loaded) -> RowLoad:
        """Read these columns from the journal into memory, as soon as there is room; then call
        `done` with None, or with the error that prevented it, unless the load was left."""
        load = RowLoad(partition, keys, fields, done)
        self._waiting.append(load)
        self._find(load, self._away(load))
        return load

    def leave(self, load: RowLoad) -> None:
        """Drop a load whose caller no longer waits; what it has loaded stays. Call
        `continue_loading` afterwards."""
        load.left = True
        load.payloads.clear()
        if load in self._waiting:
            self._waiting.remove(load)

    def continue_loading(self) -> None:
        """Load what waits for memory; call it when memory became free or idle."""
        while self._waiting:
            load = self._waiting[0]
            if load.puts is None or load.reading:
                return
            try:
                loaded = self._load(load, load.puts)
            except RLError as error:
                self._waiting.popleft().done(error)
                continue
            if not loaded:
                return
            away = self._away(load)
            if not np.isin(away, load.asked).all() or not self.ledger.unchanged(load.partition, away, load.since):
                self._find(load, away)
                return
            self._waiting.popleft().done(None)

    def make_room(
        self, take: Callable[[], Span | None], in_units: Callable[[int], bool] = lambda _: True
    ) -> Span | None:
        """Evict blocks, those used longest ago first, until `take` returns a span; returns it.
        None: the other blocks are held by leases, or by the first load that waits.

        Args:
            take: returns memory, if there is enough.
            in_units: whether blocks of a unit can make room for it.
        """
        span = take()
        if span is not None:
            return span
        first = self._waiting[0] if self._waiting else None
        blocks = self.ledger.blocks
        kept = {it.ref.slot for it in self.ledger.blocks_of(first.partition, first.keys, first.fields)} if first else ()
        blocks.retry_compactions()
        while span is None and (block := blocks.longest_idle(kept, in_units)) is not None:
            self.ledger.unload_block(block)
            self.evicted += 1
            for ref in blocks.take_released():
                self.capacity.give(ref.span)
            span = take()
        return span

    def late(self, load: RowLoad, partition: str, timeout_s: float, held: Occupancy) -> RLError:
        """The error of a read that waited `timeout_s` seconds for a load."""
        if load.puts is None or load.reading:
            return PlaneTimeout(
                f"Rows of partition {partition!r} were not read from the journal of the data plane within {round(timeout_s, 3):g} s: its disk is "
                "slow or busy. Raise TransferQueueConfig.timeout_s, or set TransferQueueConfig.journal_dir to a faster disk."
            )
        sizes = self._sizes(load, load.puts)
        following = sizes[-1] if sizes else 0
        return CapacityTimeout(
            f"A read of rows of partition {partition!r} that are on the disk alone needs {following} bytes in one piece for the next of {len(sizes)} "
            f"puts ({sum(sizes)} bytes in all), and not enough became free within {round(timeout_s, 3):g} s: {self.capacity.room()}. {held} "
            "Drop batches that are done with, read fewer rows at a time, or raise TransferQueueConfig.capacity_mb."
        )

    def _away(self, load: RowLoad) -> Ints:
        return self.ledger.on_disk(load.partition, load.keys, load.fields)

    def _find(self, load: RowLoad, away: Ints) -> None:
        """Look up the puts with rows of a load that waits."""
        load.asked, load.since, load.puts = away, self.ledger.version, None
        load.payloads.clear()
        fields = frozenset(load.fields)

        def wanted(put: PutRecord) -> bool:
            return not fields.isdisjoint(column.name for column in unpack_header(put.header).columns)

        def found(puts: tuple[FoundPut, ...] | OutputError) -> None:
            if load.left:
                return
            try:
                if isinstance(puts, OutputError):
                    raise puts
                load.puts = list(puts)
                self._check_size(load, load.puts)
            except RLError as error:
                self._fail(load, error)
            else:
                self.continue_loading()

        self.find(away.tolist(), wanted, found)

    def _check_size(self, load: RowLoad, puts: Sequence[FoundPut]) -> None:
        """Raise an error if the units of this host could never hold the puts."""
        for it in puts:
            self.capacity.check_here(it.nbytes)
        total = self.capacity.here
        if sum(rounded(it.nbytes) for it in puts) <= total:
            return
        sizes = self._sizes(load, puts)
        if sum(sizes) > total:
            raise BatchError(
                f"A read of {len(load.keys)} rows of partition {load.partition!r}, of which the disk alone has some, needs {sum(sizes)} bytes of "
                f"memory for {len(sizes)} puts (rows and columns that were put together are read together), and the storage units on the "
                f"controller's host have {total}. Read fewer rows at a time, put fewer rows together, or raise TransferQueueConfig.capacity_mb."
            )

    def _fail(self, load: RowLoad, error: RLError) -> None:
        self._waiting.remove(load)
        load.done(error)
        self.continue_loading()

    def _sizes(self, load: RowLoad, puts: Sequence[FoundPut]) -> list[int]:
        """Bytes of memory of those of the puts that are to be loaded."""
        return [rounded(it.nbytes) for it in puts if self._wants(load, it)]

    def _wants(self, load: RowLoad, found: FoundPut) -> bool:
        return self.ledger.wants(found, load.since, load.asked, load.fields)

    def _load(self, load: RowLoad, puts: list[FoundPut]) -> bool:
        """Load puts, and remove them from the list; returns whether all are loaded. Otherwise the
        load waits for payloads or for memory.

        Raises:
            BatchError, PlaneLostError: there can't be room.
        """
        while puts:
            number = puts[-1].number
            if self._wants(load, puts[-1]):
                if number not in load.payloads:
                    self._read(load, puts)
                    return False
                payload = load.payloads[number]
                if payload is not None and not self._place(load, puts[-1], payload):
                    return False
            load.payloads.pop(number, None)
            puts.pop()
        return True

    def _place(self, load: RowLoad, found: FoundPut, payload: Block) -> bool:
        """Copy a payload into memory that this process can fill: of a unit on its host; returns
        whether there was room.

        Raises:
            BatchError, PlaneLostError: no free memory would help.
        """
        nbytes = len(payload)
        self.capacity.check_here(nbytes)
        block = self.make_room(lambda: self.capacity.take_here(nbytes), self.capacity.is_here)
        if block is None:
            if not load.short:
                load.short = True
                self.on_short()
            return False
        self.memory(block)[:nbytes] = payload
        self.ledger.load(found, block, load.since, self.digest(self.memory(block)[:nbytes]))
        return True

    def _read(self, load: RowLoad, puts: Sequence[FoundPut]) -> None:
        """Read the payloads of the last of these puts."""
        numbers: list[int] = []
        nbytes = 0
        for it in reversed(puts):
            if self._wants(load, it):
                nbytes += it.nbytes
                if numbers and nbytes > READ_BYTES:
                    break
                numbers.append(it.number)

        def read(columns: Mapping[int, Mapping[str, Block] | None] | OutputError) -> None:
            load.reading = False
            if load.left:
                return
            if isinstance(columns, OutputError):
                self._fail(load, columns)
                return
            load.payloads = {number: it[PAYLOAD] if it is not None else None for number, it in columns.items()}
            self.continue_loading()

        load.reading = True
        self.read(numbers, read)
