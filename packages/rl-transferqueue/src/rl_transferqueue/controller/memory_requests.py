"""Requests for memory: reservations, puts that wait for one, and memory that clients give back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rl_protocol.errors import CapacityTimeout, RLError
from rl_transferqueue.controller.memory_accounting.capacity import Capacity, no_units
from rl_transferqueue.controller.memory_accounting.memory_queue import MemoryQueue
from rl_transferqueue.controller.memory_accounting.occupancy import Occupancy, by_client
from rl_transferqueue.controller.rows.block_table import Block, BlockTable
from rl_transferqueue.controller.sessions import Sessions
from rl_transferqueue.controller.storage_units import StorageUnits
from rl_transferqueue.transport.control_server import Caller, Handler
from rl_transferqueue.wire.messages import NOTICE, Abandon, Answer, Done, Fence, Reclaim, Reserve, Reserved, Revoked
from rl_transferqueue.wire.spans import Span

log = logging.getLogger(__name__)


class Replies(Protocol):
    """Where answers go: the controller's `Server`, or a list in tests."""

    def answer(self, caller: Caller, body: Answer) -> None:
        """Send an answer; a caller that is gone gets nothing."""
        ...

    def fail(self, caller: Caller, error: RLError) -> None:
        """Answer with an error."""
        ...


class MemoryRequests:
    """Reserves memory for puts, in the order of `MemoryQueue`.

    Args:
        fence_all: free a session's reservations only after a `Fence`, also those of this host;
            needed where a backend holds the bytes. Reservations of other hosts always need one.
    """

    def __init__(
        self,
        capacity: Capacity,
        units: StorageUnits,
        sessions: Sessions,
        blocks: BlockTable,
        replies: Replies,
        *,
        fence_all: bool,
    ) -> None:
        self._capacity = capacity
        self._units = units
        self._sessions = sessions
        self._blocks = blocks
        self._replies = replies
        self._fence_all = fence_all
        self._queue = MemoryQueue[Caller]()
        self.first: Callable[[], None] | None = None
        """Called before waiting puts get memory that became free."""
        self.make_room: Callable[[Callable[[], Span | None]], Span | None] | None = None
        """`RowLoads.make_room`, where rows can leave memory."""

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """Message type -> its handler."""
        return {Reserve: self._reserve, Abandon: self._abandon}

    @property
    def waiting(self) -> int:
        """Puts that wait."""
        return len(self._queue)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that these puts wait for."""
        return self._queue.nbytes

    def serve(self) -> None:
        """Give memory to waiting puts; call it whenever memory became free or idle."""
        if self.first is not None:
            self.first()
        if not self._queue or not self._units:
            return
        for caller, span in self._queue.serve(self._take):
            self._sessions.unpark(caller)
            self._sessions.get(caller.session).unacknowledged.add(caller.request, span)
            self._replies.answer(caller, Reserved(span))
        self._units.keep_ahead(self._capacity.high_water)

    def spare(self, caller: Caller, nbytes: int) -> Span | None:
        """Memory for the caller's next puts, if none waits and there is plenty."""
        if not nbytes or self._queue:
            return None
        spare = self._capacity.spare(caller.session, nbytes, self._host(caller.session))
        self._units.keep_ahead(self._capacity.high_water)
        if spare is not None:
            self._sessions.get(caller.session).unacknowledged.add(caller.request, spare)
        return spare

    def end_session(self, session: bytes, *, remote: bool) -> None:
        """Free what a departed session has reserved: it can't commit any more."""
        if remote or self._fence_all:
            for unit in self._units:
                self._fence(Fence(session, self._capacity.reserved(session, unit), True, 0), unit)
        else:
            self._capacity.end_session(session)
            self.serve()

    def lose_unit(self, unit: int) -> None:
        """A unit has ended with its memory; without any unit no put can wait."""
        self._capacity.lose(unit)
        if not self._units:
            for caller in self._queue.clear():
                self._sessions.unpark(caller)
                self._replies.fail(caller, no_units())

    def _take(self, put: Caller, nbytes: int) -> Span | None:
        def take() -> Span | None:
            return self._capacity.reserve(put.session, nbytes, self._host(put.session))

        return take() if self.make_room is None else self.make_room(take)

    def _leased(self) -> Mapping[bytes, Sequence[Block]]:
        """session -> blocks that only its leases keep in memory, where rows can leave it."""
        return self._blocks.leased() if self.make_room is not None else {}

    def _host(self, session: bytes) -> str:
        return self._sessions.get(session).host

    def _reserve(self, caller: Caller, message: Reserve) -> None:
        self._sessions.get(caller.session)
        self._capacity.check_size(message.nbytes)
        self._queue.add(caller, message.nbytes)
        self.serve()
        if caller not in self._queue:
            return
        if message.timeout_s <= 0:
            self._queue.discard(caller)
            raise self._full(message)

        def expired() -> None:
            self._replies.fail(caller, self._full(message))
            self.serve()

        self._sessions.park(caller, message.timeout_s, lambda: self._queue.discard(caller), expired)
        self.ask_holders()

    def ask_holders(self) -> None:
        """Ask clients for memory that they hold and may not need: reservations, and where rows can
        leave memory, leases of cached locations."""
        for session in self._capacity.holders():
            self._replies.answer(Caller(session, NOTICE), Reclaim())
        for session, blocks in self._leased().items():
            self._replies.answer(Caller(session, NOTICE), Revoked(tuple(block.ref.id for block in blocks)))

    def _abandon(self, caller: Caller, message: Abandon) -> None:
        session = self._sessions.get(caller.session)
        for span in message.spans:
            if message.late:
                session.abandoned += 1
                self._fence(Fence(caller.session, (span,), False, session.abandoned), span.unit)
            else:
                self._capacity.abandon(caller.session, span)
        self.serve()

    def _fence(self, fence: Fence, unit: int) -> None:
        """Free spans of a session once nothing that it sent can arrive there any more."""

        def fenced(answer: Answer) -> None:
            check_done(answer, fence)
            for span in fence.spans:
                self._capacity.abandon(fence.session, span)
            self.serve()

        if unit in self._units:  # otherwise the memory is gone, too
            self._units.send(unit, fence, fenced)

    def occupancy(self) -> Occupancy:
        """Who holds the memory, for errors."""
        names = self._sessions.names()
        return Occupancy(
            partitions=self._blocks.by_partition,
            reserved=by_client(self._capacity.holders(), names),
            read=by_client(self._blocks.read_only_by_leases(), names),
            leased=by_client(
                {session: sum(it.ref.span.nbytes for it in blocks) for session, blocks in self._leased().items()}, names
            ),
            waiting=self.waiting,
            waiting_bytes=self.waiting_bytes,
        )

    def _full(self, message: Reserve) -> CapacityTimeout:
        return self._capacity.full(message.nbytes, message.timeout_s, self.occupancy())


def check_done(answer: Answer, request: object) -> None:
    """Log what a storage unit answered if it is not `Done`."""
    if not isinstance(answer, Done):
        log.error("a storage unit answered %s to %s", answer, request)
