"""A storage unit: memory that clients map and the controller gives out. It touches pages ahead of need and copies sparse blocks."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from rl_protocol.errors import WireError
from rl_protocol.wire import plan, plan_rows, read_payload, write_payload
from rl_transferqueue.arena import Arena
from rl_transferqueue.bulk_server import BulkServer
from rl_transferqueue.header_cache import unpack_header
from rl_transferqueue.hosts import Endpoints, endpoint
from rl_transferqueue.keys import PlaneKey
from rl_transferqueue.messages import (
    CONTROLLER,
    Copy,
    Done,
    Fence,
    Measure,
    Measured,
    Populate,
    Span,
)
from rl_transferqueue.reactor import Reactor
from rl_transferqueue.server import Caller, Server
from rl_transferqueue.table import Ints


class StorageUnit:
    """State and handlers of one unit. It holds bytes and knows nothing about them: whose they are is the controller's business."""

    def __init__(self, index: int, address: str, capacity: int, segment: int) -> None:
        self.reactor = Reactor(idle=self._populate)
        self.arena = Arena(capacity)
        self._index = index
        self._segment = segment
        self._populated = 0
        self._wanted = segment
        self._bulk: BulkServer | None = None
        self.server = Server(
            self.reactor,
            address,
            {
                Fence: self._fence,
                Populate: self._want,
                Measure: self._measure,
                Copy: self._copy,
            },
        )

    @property
    def shared_memory(self) -> tuple[int, int]:
        """File descriptor and bytes of what clients map."""
        return self.arena.fd, len(self.arena.memory)

    def listen(self, host: str, key: PlaneKey, port: int = 0) -> Endpoints:
        """Also serve clients of other hosts; 0: at a port that is free."""
        self._bulk = BulkServer(self.reactor, host, key, memoryview(self.arena.memory), port)
        return Endpoints(bulk=endpoint(host, self._bulk.port))

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call back once it serves, which is now."""
        callback()

    def close(self) -> None:
        """Close the sockets; the arena ends with the process."""
        self.server.close()
        if self._bulk is not None:
            self._bulk.close()

    def _fence(self, caller: Caller, message: Fence) -> Done:
        _check_controller(caller)
        if self._bulk is not None:
            self._bulk.fence(message)
        return Done()

    def _want(self, caller: Caller, message: Populate) -> None:
        _check_controller(caller)
        self._wanted = max(self._wanted, min(message.stop, len(self.arena.memory)))

    def _measure(self, caller: Caller, message: Measure) -> Measured:
        _check_controller(caller)
        header = unpack_header(message.header)
        batch = read_payload(header, self._memory(message.source)[: header.payload], message.fields)
        wanted = plan_rows(batch, _rows(message.rows))
        return Measured(msgspec.msgpack.encode(wanted), wanted.payload)

    def _copy(self, caller: Caller, message: Copy) -> Done:
        _check_controller(caller)
        header = unpack_header(message.header)
        batch = read_payload(header, self._memory(message.source)[: header.payload], message.fields)
        chosen = batch.select_rows(_rows(message.rows))
        wanted = plan(chosen)
        write_payload(chosen, wanted, self._memory(message.target)[: wanted.payload])
        return Done()

    def _memory(self, span: Span) -> memoryview:
        if span.unit != self._index or span.offset + span.nbytes > len(self.arena.memory):
            raise WireError(f"{span} is not in storage unit {self._index} of {len(self.arena.memory)} bytes.")
        return memoryview(self.arena.memory)[span.offset : span.offset + span.nbytes]

    def _populate(self) -> bool:
        """Touch the next segment when the blocks come near it; True: there may be more to do."""
        if self._populated >= min(self._wanted, len(self.arena.memory)):
            return False
        size = min(self._segment, len(self.arena.memory) - self._populated)
        if not self.arena.populate(self._populated, size):
            self._populated = len(self.arena.memory)
            return False
        self._populated += size
        return True


def _rows(packed: bytes) -> Ints:
    return np.frombuffer(packed, "<i8")


def _check_controller(caller: Caller) -> None:
    if caller.session != CONTROLLER:
        raise WireError("Only the controller may say this to a storage unit.")
