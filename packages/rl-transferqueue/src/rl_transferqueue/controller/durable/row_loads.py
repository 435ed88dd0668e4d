"""Rows that are read from the journal into memory, once there is room."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rl_protocol.errors import CapacityTimeout, OutputError, PlaneTimeout, RLError
from rl_transferqueue.controller.durable.journal_thread import Read
from rl_transferqueue.controller.memory_accounting.capacity import Capacity
from rl_transferqueue.controller.memory_accounting.occupancy import Occupancy
from rl_transferqueue.controller.rows.ledger import Ledger
from rl_transferqueue.journal.records import PutRecord
from rl_transferqueue.wire.arrays import Ints
from rl_transferqueue.wire.spans import Span, rounded

Loaded: TypeAlias = Callable[[RLError | None], None]
PAYLOAD = "payload"
"""Name of a put's block in its record."""


@dataclass(eq=False, slots=True)
class RowLoad:
    """One request for rows of the journal."""

    done: Loaded
    puts: list[PutRecord] | None = None
    """Puts to be loaded, the newest last; None: the journal is still being read."""
    left: bool = False
    """Nobody waits for it any more."""


@dataclass(slots=True)
class RowLoads:
    """Loads by arrival; the first one waits for memory, and the others for it.

    Args:
        ledger, capacity: of the plane.
        read: `Journal.read` in the journal's thread.
        memory: bytes of a span.
        digest: of the payload of a block, see `Block`.
    """

    ledger: Ledger
    capacity: Capacity
    read: Callable[[Sequence[int], Read], None]
    memory: Callable[[Span], memoryview]
    digest: Callable[[memoryview], bytes]
    _waiting: deque[RowLoad] = field(default_factory=deque[RowLoad])

    def start(self, generations: Ints, done: Loaded) -> RowLoad:
        """Bring rows from the journal to memory, as soon as there is room; then call `done`, with
        the error that prevented it or None, unless the load was left."""
        load = RowLoad(done)

        def found(puts: tuple[PutRecord, ...] | OutputError) -> None:
            if load.left:
                return
            if isinstance(puts, OutputError):
                done(puts)
                return
            try:
                for put in puts:
                    self.capacity.check_size(len(put.columns[PAYLOAD]))
            except RLError as error:
                done(error)
                return
            load.puts = list(puts)
            self._waiting.append(load)
            self.continue_loading()

        self.read(generations.tolist(), found)
        return load

    def leave(self, load: RowLoad) -> None:
        """Nobody waits for the load any more; what it has loaded stays. `continue_loading` must
        follow."""
        load.left = True
        if load in self._waiting:
            self._waiting.remove(load)

    def continue_loading(self) -> None:
        """Load what waits for memory; call it when memory became free."""
        while self._waiting and self._load(self._waiting[0].puts or []):
            self._waiting.popleft().done(None)

    def late(self, load: RowLoad, partition: str, timeout_s: float, held: Occupancy) -> RLError:
        """The error of a read that waited `timeout_s` seconds for a load."""
        if load.puts is None:
            return PlaneTimeout(
                f"Rows of partition {partition!r} were not read from the journal of the data plane within {timeout_s:.3g} s: its disk is "
                "slow or busy. Raise TransferQueueConfig.timeout_s, or set TransferQueueConfig.journal_dir to a faster disk."
            )
        sizes = [rounded(len(put.columns[PAYLOAD])) for put in load.puts if self.ledger.wants(put)]
        newest = sizes[-1] if sizes else 0
        return CapacityTimeout(
            f"A read of rows of partition {partition!r} that are on the disk alone needs {newest} bytes in one piece for the next of {len(sizes)} "
            f"puts ({sum(sizes)} bytes in all), and not enough became free within {timeout_s:.3g} s: {self.capacity.room()}. {held} "
            "Clear rows that are done with, free the memory of rows that are not read now (`unload`), read fewer rows at a time, or raise "
            "TransferQueueConfig.capacity_mb."
        )

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
                self.ledger.load(puts[-1], block, self.digest(self.memory(block)[: len(payload)]))
            puts.pop()
        return True
