"""A storage unit with an arena: touches memory ahead of need and copies sparse blocks."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec
import numpy as np
import xxhash

from rl_protocol.errors import PlaneLostError, WireError
from rl_protocol.wire import plan, plan_rows, read_payload, write_payload
from rl_transferqueue.memory.arena import Arena
from rl_transferqueue.transport.addresses import Endpoints, endpoint
from rl_transferqueue.transport.bulk_server import BulkServer
from rl_transferqueue.transport.control_server import Caller, Server
from rl_transferqueue.transport.event_loop import Reactor
from rl_transferqueue.transport.plane_secret import PlaneKey
from rl_transferqueue.wire.arrays import Ints
from rl_transferqueue.wire.header_cache import unpack_header
from rl_transferqueue.wire.messages import (
    CONTROLLER,
    ArenaMemory,
    AwaitEnd,
    ComputeDigest,
    Copy,
    DescribeMemory,
    Digest,
    Done,
    Fence,
    HangUp,
    Measure,
    Measured,
    Populate,
)
from rl_transferqueue.wire.process_liveness import open_pidfd, this_process
from rl_transferqueue.wire.spans import Span


class StorageUnit:
    """State and handlers of one unit. It holds bytes; the controller knows to whom they belong.

    Args:
        address: path of the unix socket to listen on.
        capacity: bytes.
        segment: bytes of memory that it touches ahead of need, in one step.
        joins: the controller is on another host.
    """

    def __init__(self, address: str, capacity: int, segment: int, *, joins: bool = False) -> None:
        self._joins = joins
        self._incarnation = 1
        """Of the controller to which the arena belongs."""
        self.reactor = Reactor(idle=self._populate)
        self.arena = Arena(capacity)
        self._segment = segment
        self._populated = 0
        self._wanted = segment
        self._bulk: BulkServer | None = None
        self.server = Server(
            self.reactor,
            address,
            {
                Fence: self._fence,
                AwaitEnd: self._await_end,
                Populate: self._want,
                DescribeMemory: self._describe,
                HangUp: self._hang_up,
                Measure: self._measure,
                ComputeDigest: self._digest,
                Copy: self._copy,
            },
        )

    @property
    def shared_memory(self) -> tuple[int, int]:
        """File descriptor and bytes of what clients map."""
        return self.arena.fd, len(self.arena.memory)

    def listen(self, host: str, key: PlaneKey, port: int = 0) -> Endpoints:
        """Also serve clients of other hosts, and a controller there at the port before; 0: any free
        ports."""
        control = self.server.listen(host, key, port) if self._joins else ""
        port += bool(port and self._joins)
        self._bulk = BulkServer(self.reactor, host, key, memoryview(self.arena.memory), port)
        return Endpoints(control, endpoint(host, self._bulk.port))

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call back at once: the unit is ready."""
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

    def _await_end(self, caller: Caller, message: AwaitEnd) -> Done | None:
        _check_controller(caller)
        try:
            pidfd = open_pidfd(message.process, "The client")
        except PlaneLostError:
            return Done()

        def ended() -> None:
            self.reactor.unwatch(pidfd)
            os.close(pidfd)
            self.server.answer(caller, Done())

        self.reactor.watch(pidfd, ended)
        return None

    def _want(self, caller: Caller, message: Populate) -> None:
        _check_controller(caller)
        self._wanted = max(self._wanted, min(message.stop, len(self.arena.memory)))

    def _describe(self, caller: Caller, message: DescribeMemory) -> ArenaMemory:
        _check_controller(caller)
        if message.incarnation < self._incarnation:
            raise WireError(
                f"This storage unit serves incarnation {self._incarnation} of the plane's controller; got {message.incarnation}."
            )
        if message.incarnation > self._incarnation:
            self._incarnation = message.incarnation
            self.arena = self.arena.replaced()
            self._populated, self._wanted = 0, self._segment
            if self._bulk is not None:
                self._bulk.renew(memoryview(self.arena.memory), self._incarnation)
        return ArenaMemory(this_process(), *self.shared_memory)

    def _hang_up(self, caller: Caller, _: HangUp) -> None:
        _check_controller(caller)
        if self._bulk is not None:
            self._bulk.close()

    def _measure(self, caller: Caller, message: Measure) -> Measured:
        _check_controller(caller)
        header = unpack_header(message.header)
        batch = read_payload(header, self._memory(message.source)[: header.payload], message.fields)
        wanted = plan_rows(batch, _rows(message.rows))
        return Measured(msgspec.msgpack.encode(wanted), wanted.payload)

    def _digest(self, caller: Caller, message: ComputeDigest) -> Digest:
        _check_controller(caller)
        return Digest(xxhash.xxh3_128_digest(self._memory(message.block)[: message.nbytes]))

    def _copy(self, caller: Caller, message: Copy) -> Done:
        _check_controller(caller)
        header = unpack_header(message.header)
        batch = read_payload(header, self._memory(message.source)[: header.payload], message.fields)
        chosen = batch.select_rows(_rows(message.rows))
        wanted = plan(chosen)
        write_payload(chosen, wanted, self._memory(message.target)[: wanted.payload])
        return Done()

    def _memory(self, span: Span) -> memoryview:
        if span.offset + span.nbytes > len(self.arena.memory):
            raise WireError(f"{span} is not in this storage unit of {len(self.arena.memory)} bytes.")
        return memoryview(self.arena.memory)[span.offset : span.offset + span.nbytes]

    def _populate(self) -> bool:
        """Touch the next segment if it is wanted; True: there may be more to do."""
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
