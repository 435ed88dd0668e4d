"""Reads blocks of the storage units of other hosts, for the journal."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeAlias

from rl_protocol.errors import PlaneLostError, RLError
from rl_transferqueue.controller.durable.reactor_calls import ReactorCalls
from rl_transferqueue.transport.bulk_client import BulkConnection, dial
from rl_transferqueue.transport.bulk_protocol import HANDSHAKE_S, SESSION_BYTES, ReadBlock, Sending, frame
from rl_transferqueue.transport.event_loop import Reactor
from rl_transferqueue.transport.plane_secret import PlaneKey
from rl_transferqueue.wire.descriptor import UnitAddress
from rl_transferqueue.wire.messages import CONTROLLER
from rl_transferqueue.wire.spans import Span

log = logging.getLogger(__name__)

Fetched: TypeAlias = Callable[[bytearray | RLError], None]
_READ_S = 60.0
"""Longest time for one block. The end of a host is noticed within seconds, and ends its reads."""


class RemoteBlocks:
    """Reads blocks over bulk connections, in one thread for each unit, in order.

    Lifecycle: until `close`.

    Args:
        reactor: runs the callbacks.
        key: that of the plane.
        incarnation: of the controller.
    """

    def __init__(self, reactor: Reactor, key: PlaneKey, incarnation: int) -> None:
        self._calls = ReactorCalls(reactor)
        self._key = key
        self._incarnation = incarnation
        self._readers: dict[int, _UnitReader] = {}
        self._closing: list[_UnitReader] = []

    def add(self, number: int, unit: UnitAddress) -> None:
        """Blocks of this unit will be read."""
        name = f"storage unit {number}"
        connect = partial(dial, unit, unit.host, name, self._key, CONTROLLER[:SESSION_BYTES], HANDSHAKE_S)
        self._readers[number] = _UnitReader(connect, name, self._incarnation)

    def lose(self, number: int) -> None:
        """A unit has ended: reads of its blocks fail, also those under way. Units of this host are
        ignored."""
        reader = self._readers.pop(number, None)
        if reader is not None:
            reader.end()
            self._closing.append(reader)

    def fetch(self, block: Span, nbytes: int, fetched: Fetched) -> None:
        """Call `fetched` with the first `nbytes` bytes of a block, or with the error that prevented
        it; not after `close`. The unit is not lost."""
        self._readers[block.unit].read(block.offset, nbytes, lambda found: self._calls.post([partial(fetched, found)]))

    def close(self) -> None:
        """End all reads."""
        for number in list(self._readers):
            self.lose(number)
        for reader in self._closing:
            reader.join()
        self._calls.close()


class _UnitReader:
    """Reads blocks of one unit in a thread of its own."""

    def __init__(self, connect: Callable[[], BulkConnection], name: str, incarnation: int) -> None:
        self._connect = connect
        self._name = name
        self._incarnation = incarnation
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"journal reads of {name}")
        self._lock = threading.Lock()
        self._connection: BulkConnection | None = None
        self._ended = False

    def read(self, offset: int, nbytes: int, done: Fetched) -> None:
        """Call `done` in the thread."""

        def work() -> None:
            try:
                found: bytearray | RLError = self._read(offset, nbytes)
            except RLError as error:
                log.warning("a block was not read for the journal: %s", error)
                found = error
            done(found)

        self._thread.submit(work)

    def end(self) -> None:
        """Fail all reads."""
        with self._lock:
            self._ended = True
            if self._connection is not None:
                self._connection.interrupt()
        self._thread.submit(self._close)
        self._thread.shutdown(wait=False)

    def join(self) -> None:
        """Wait for the thread, which ends after the reads that fail."""
        self._thread.shutdown()

    def _read(self, offset: int, nbytes: int) -> bytearray:
        self._check()
        connection = self._connection if self._connection is not None else self._connect()
        with self._lock:
            self._connection = connection
        try:
            self._check()  # `end` interrupts the connection from here on
            connection.until(time.monotonic() + _READ_S)
            connection.send([frame(ReadBlock(offset, nbytes, self._incarnation))])
            connection.expect(Sending)
            found = bytearray(nbytes)
            connection.receive(memoryview(found))
        except BaseException:
            self._close()
            raise
        return found

    def _close(self) -> None:
        """Close the connection, if there is one."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _check(self) -> None:
        if self._ended:
            raise PlaneLostError(f"The {self._name} of the data plane has ended; repeat the put.")
