"""A storage unit: hands out blocks of its arena, takes them back when the controller says so, and never looks into them but to compact."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np
import zmq

from rl_protocol.errors import BatchError, CapacityTimeout, WireError
from rl_protocol.wire import Header, plan, read_payload, write_payload
from rl_transferqueue.allocator import Allocator, rounded
from rl_transferqueue.arena import Arena
from rl_transferqueue.bulk_server import BulkServer
from rl_transferqueue.hosts import Endpoints, endpoint
from rl_transferqueue.keys import PlaneKey
from rl_transferqueue.messages import (
    BLOCK_BITS,
    CONTROLLER,
    Allocate,
    Allocated,
    BlockRef,
    Cancel,
    Compact,
    Compacted,
    Done,
    EndSession,
    GetUnitStats,
    Release,
    SessionBlocks,
    UnitStats,
)
from rl_transferqueue.reactor import Reactor, Timer
from rl_transferqueue.server import Caller, Server

_header_decoder = msgspec.msgpack.Decoder(Header)


@dataclass(frozen=True, slots=True)
class _Parked:
    caller: Caller
    nbytes: int
    timer: Timer


class StorageUnit:
    """State and handlers of one unit.

    A block belongs to the session it was given to until the controller knows it; when a session ends, the controller asks for its blocks
    and releases those that were never committed. Requests that find no room wait in order of arrival.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], index: int, address: str, capacity: int, segment: int
    ) -> None:
        self.reactor = Reactor(idle=self._populate)
        self.arena = Arena(capacity)
        self._index = index
        self._space = Allocator(capacity)
        self._segment = segment
        self._populated = 0
        self._last_id = index << BLOCK_BITS
        self._blocks: dict[int, BlockRef] = {}
        self._given: dict[bytes, dict[int, int]] = {}
        self._owner: dict[int, Caller] = {}
        self._ended: set[bytes] = set()
        self._parked: deque[_Parked] = deque()
        self._bulk: BulkServer | None = None
        self.server = Server(
            self.reactor,
            context,
            address,
            {
                Allocate: self._allocate,
                Cancel: self._cancel,
                Release: self._release,
                EndSession: self._end_session,
                Compact: self._compact,
                GetUnitStats: self._stats,
            },
        )

    def listen(self, host: str, key: PlaneKey) -> Endpoints:
        """Also serve clients of other hosts."""
        self._bulk = BulkServer(self.reactor, host, key, self)
        return Endpoints(self.server.listen(host, key), endpoint(host, self._bulk.port))

    def close(self) -> None:
        """Close the sockets; the arena ends with the process."""
        self.server.close()
        if self._bulk is not None:
            self._bulk.close()

    # -- for bulk connections
    @property
    def memory(self) -> memoryview:
        """See BulkArena."""
        return memoryview(self.arena.memory)

    def may_write(self, session: bytes, offset: int, nbytes: int) -> bool:
        """See BulkArena."""
        mine = (self._blocks[block] for block in self._given.get(session, {}).values())
        return any(block.offset <= offset and offset + nbytes <= block.offset + block.nbytes for block in mine)

    # -- for clients
    def _allocate(self, caller: Caller, message: Allocate) -> Allocated | None:
        if caller.session in self._ended:
            raise WireError("This session has ended; connect again.")
        if message.nbytes > self._space.capacity:
            raise BatchError(
                f"A block of {message.nbytes} bytes can never fit a storage unit of {self._space.capacity} bytes: put fewer rows at a "
                "time, or raise transfer_queue.capacity_mb or lower transfer_queue.num_storage_units."
            )
        block = None if self._parked else self._take(message.nbytes, caller)
        if block is not None:
            return Allocated(block)
        if message.timeout_s <= 0:
            raise self._full(message.nbytes, 0)
        timer = self.reactor.call_later(message.timeout_s, lambda: self._give_up(parked, message.timeout_s))
        parked = _Parked(caller, message.nbytes, timer)
        self._parked.append(parked)
        return None

    def _cancel(self, caller: Caller, message: Cancel) -> Done:
        target = Caller(caller.session, message.request)
        for parked in list(self._parked):
            if parked.caller == target:
                parked.timer.cancel()
                self._parked.remove(parked)
        block = self._given.get(caller.session, {}).get(message.request)
        if block is not None:
            self._free((block,))
        self._serve_parked()
        return Done()

    # -- for the controller
    def _release(self, caller: Caller, message: Release) -> None:
        _check_controller(caller)
        self._free(message.blocks)
        self._serve_parked()

    def _end_session(self, caller: Caller, message: EndSession) -> SessionBlocks:
        _check_controller(caller)
        self._ended.add(message.session)
        for parked in list(self._parked):
            if parked.caller.session == message.session:
                parked.timer.cancel()
                self._parked.remove(parked)
        self._serve_parked()
        return SessionBlocks(message.session, tuple(self._given.get(message.session, {}).values()))

    def _compact(self, caller: Caller, message: Compact) -> Compacted:
        _check_controller(caller)
        old = self._blocks.get(message.block)
        if old is None:
            raise WireError(f"Block {message.block} is not in storage unit {self._index}.")
        header = _header_decoder.decode(message.header)
        payload = memoryview(self.arena.memory)[old.offset : old.offset + header.payload]
        rows = np.frombuffer(message.rows, "<i8")
        batch = read_payload(header, payload, message.fields).select_rows(rows)
        wanted = plan(batch)
        if rounded(wanted.payload) >= old.nbytes:
            return Compacted(None, b"", no_gain=True)
        new = self._take(wanted.payload, None)
        if new is None:
            return Compacted(None, b"")
        write_payload(batch, wanted, memoryview(self.arena.memory)[new.offset : new.offset + wanted.payload])
        return Compacted(new, msgspec.msgpack.encode(wanted))

    def _stats(self, caller: Caller, message: GetUnitStats) -> UnitStats:
        del caller, message
        return UnitStats(self._space.used, self._space.capacity)

    # -- inner
    def _take(self, nbytes: int, owner: Caller | None) -> BlockRef | None:
        offset = self._space.take(nbytes)
        if offset is None:
            return None
        self._last_id += 1
        block = BlockRef(self._last_id, self._index, offset, rounded(nbytes))
        self._blocks[block.id] = block
        if owner is not None:
            self._owner[block.id] = owner
            self._given.setdefault(owner.session, {})[owner.request] = block.id
        return block

    def _free(self, blocks: tuple[int, ...]) -> None:
        for block_id in blocks:
            block = self._blocks.pop(block_id, None)
            if block is None:
                continue
            self._space.give(block.offset)
            if self._bulk is not None:
                self._bulk.cut(block.offset, block.nbytes)
            owner = self._owner.pop(block_id, None)
            if owner is not None:
                mine = self._given[owner.session]
                del mine[owner.request]
                if not mine:
                    del self._given[owner.session]

    def _serve_parked(self) -> None:
        while self._parked:
            parked = self._parked[0]
            block = self._take(parked.nbytes, parked.caller)
            if block is None:
                return
            self._parked.popleft()
            parked.timer.cancel()
            self.server.answer(parked.caller, Allocated(block))

    def _give_up(self, parked: _Parked, timeout_s: float) -> None:
        self._parked.remove(parked)
        self.server.fail(parked.caller, self._full(parked.nbytes, timeout_s))
        self._serve_parked()

    def _full(self, nbytes: int, timeout_s: float) -> CapacityTimeout:
        free = self._space.capacity - self._space.used
        return CapacityTimeout(
            f"A put needs {rounded(nbytes)} bytes; storage unit {self._index} has {free} of {self._space.capacity} bytes available, "
            f"{self._space.largest} in one piece, and no more became free within {timeout_s:g} s. Clear rows that are done with, or raise "
            "transfer_queue.capacity_mb."
        )

    def _populate(self) -> bool:
        """Touch the next segment when the blocks come near it; True: there may be more to do."""
        if self._populated >= self._space.capacity or self._populated >= self._space.high_water + self._segment:
            return False
        size = min(self._segment, self._space.capacity - self._populated)
        if not self.arena.populate(self._populated, size):
            self._populated = self._space.capacity
            return False
        self._populated += size
        return True


def _check_controller(caller: Caller) -> None:
    if caller.session != CONTROLLER:
        raise WireError("Only the controller may say this to a storage unit.")
