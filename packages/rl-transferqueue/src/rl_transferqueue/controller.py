"""The controller: the ledger behind a socket. It parks waiters, watches the clients' processes, and tells the units what to free."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import zmq

from rl_protocol.errors import PlaneTimeout, RLError, WireError
from rl_transferqueue.blocks import Block
from rl_transferqueue.bulk_server import BulkServer
from rl_transferqueue.hosts import Endpoints, endpoint
from rl_transferqueue.keys import PlaneKey
from rl_transferqueue.ledger import Ledger, Waiter
from rl_transferqueue.liveness import ProcessId, open_pidfd
from rl_transferqueue.messages import (
    BLOCK_BITS,
    CONTROLLER,
    MAX_FRAME,
    Answer,
    Bye,
    Cancel,
    Clear,
    Cleared,
    Commit,
    Compact,
    Compacted,
    Done,
    EndSession,
    GetStats,
    GetUnitStats,
    GiveBack,
    Hello,
    ListRows,
    Locate,
    Located,
    Release,
    ReleaseLeases,
    Reply,
    Request,
    Rows,
    SessionBlocks,
    Stats,
    UnitRequest,
    UnitStats,
    WaitReady,
    pack,
)
from rl_transferqueue.reactor import Reactor, Timer
from rl_transferqueue.server import Caller, Server

log = logging.getLogger(__name__)

_decoder = msgspec.msgpack.Decoder(Reply)


class _UnitLink:
    """Requests to one storage unit, in order; answers go to the callback given with each."""

    def __init__(self, reactor: Reactor, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, CONTROLLER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self._socket.connect(address)
        self._callbacks: dict[int, Callable[[Answer], None]] = {}
        self._last = 0
        reactor.watch(self._socket, self._read)

    def send(self, body: UnitRequest, callback: Callable[[Answer], None] | None = None) -> None:
        self._last += 1
        if callback is not None:
            self._callbacks[self._last] = callback
        self._socket.send(pack(Request(self._last, body)), zmq.DONTWAIT)

    def close(self) -> None:
        self._socket.close()

    def _read(self) -> None:
        while True:
            try:
                frame = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            reply = _decoder.decode(frame)
            callback = self._callbacks.pop(reply.id, None)
            if callback is not None:
                callback(reply.body)


@dataclass(slots=True)
class _Session:
    pidfd: int
    """Of the client's process, or the socket of a client on another host: readable when the client is gone."""
    waiting: dict[int, tuple[Waiter, Timer]] = field(default_factory=dict[int, "tuple[Waiter, Timer]"])


class Controller:
    """State and handlers of the controller."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, units: Sequence[str]) -> None:
        self.reactor = Reactor()
        self._ledger = Ledger()
        self._sessions: dict[bytes, _Session] = {}
        self._departed: dict[bytes, int] = {}
        """Ended sessions that still hold leases, and the pidfd of each."""
        self._bulk: BulkServer | None = None
        self._units = [_UnitLink(self.reactor, context, unit) for unit in units]
        self.server = Server(
            self.reactor,
            context,
            address,
            {
                Hello: self._hello,
                Bye: self._bye,
                Commit: self._commit,
                Locate: self._locate,
                ReleaseLeases: self._release_leases,
                WaitReady: self._wait_ready,
                GiveBack: self._give_back,
                ListRows: self._list_rows,
                Clear: self._clear,
                GetStats: self._stats,
                Cancel: self._cancel,
            },
        )

    def listen(self, host: str, key: PlaneKey) -> Endpoints:
        """Also serve clients of other hosts."""
        self._bulk = BulkServer(self.reactor, host, key)
        return Endpoints(self.server.listen(host, key), endpoint(host, self._bulk.port))

    def close(self) -> None:
        """Close all sockets."""
        self.server.close()
        if self._bulk is not None:
            self._bulk.close()
        for unit in self._units:
            unit.close()

    # -- sessions
    def _hello(self, caller: Caller, message: Hello) -> Done:
        if caller.session in self._sessions or caller.session in self._departed or len(caller.session) != 8:
            raise WireError("This session exists already, or its identity is not 8 bytes.")
        pidfd = self._lifeline(caller.session, message.process)
        self._sessions[caller.session] = _Session(pidfd)
        self.reactor.watch(pidfd, lambda: self._died(caller.session))
        return Done()

    def _lifeline(self, session: bytes, process: ProcessId | None) -> int:
        """A file descriptor that becomes readable when the client is gone."""
        if process is not None:
            return open_pidfd(process, "The client")
        connection = self._bulk.claim(session) if self._bulk is not None else None
        if connection is None:
            raise WireError("A client that names no process needs a bulk connection to the controller first.")
        return connection

    def _bye(self, caller: Caller, message: Bye) -> Done:
        del message
        pidfd = self._session(caller).pidfd
        self._end(caller.session)
        self._departed[caller.session] = pidfd
        self._forget_departed(caller.session)
        return Done()

    def _died(self, session: bytes) -> None:
        if session in self._sessions:
            self._departed[session] = self._sessions[session].pidfd
            self._end(session)
        self._ledger.blocks.release(session)
        self._forget_departed(session)
        self._settle()

    def _forget_departed(self, session: bytes) -> None:
        """A process need not be watched any more once its session has ended and holds nothing."""
        if session in self._departed and not self._ledger.blocks.has_leases(session):
            pidfd = self._departed.pop(session)
            self.reactor.unwatch(pidfd)
            os.close(pidfd)

    def _end(self, session: bytes) -> None:
        """From here on the session can't commit, so what it has not committed yet can be freed."""
        ended = self._sessions.pop(session)
        for waiter, timer in ended.waiting.values():
            timer.cancel()
            self._ledger.forget(waiter)
        self._ledger.end_session(session)
        for unit in self._units:
            unit.send(EndSession(session), self._free_uncommitted)

    def _free_uncommitted(self, answer: Answer) -> None:
        assert isinstance(answer, SessionBlocks)
        lost = [block for block in answer.blocks if block not in self._ledger.blocks.blocks]
        if lost:
            self._units[lost[0] >> BLOCK_BITS].send(Release(tuple(lost)))

    def _session(self, caller: Caller) -> _Session:
        session = self._sessions.get(caller.session)
        if session is None:
            raise WireError("This session is not known or has ended; connect again.")
        return session

    # -- writing
    def _commit(self, caller: Caller, message: Commit) -> Done:
        self._session(caller)
        block = message.block
        if block is not None and not block.id >> BLOCK_BITS == block.unit < len(self._units):
            raise WireError(f"Block {block.id} is of no storage unit of this plane.")
        try:
            served = self._ledger.commit(
                caller.session, message.put_id, message.partition, message.keys, message.tags, block, message.header
            )
        except RLError:
            if block is not None and block.id not in self._ledger.blocks.blocks:
                self._units[block.unit].send(Release((block.id,)))
            raise
        self._serve(served)
        self._settle()
        return Done()

    def _clear(self, caller: Caller, message: Clear) -> Cleared:
        del caller
        count = self._ledger.clear(message.partition, message.keys)
        self._settle()
        return Cleared(count)

    # -- reading
    def _locate(self, caller: Caller, message: Locate) -> Located:
        self._session(caller)
        return self._ledger.locate(caller.session, message.lease, message.partition, message.keys, message.fields)

    def _release_leases(self, caller: Caller, message: ReleaseLeases) -> None:
        self._ledger.blocks.release(caller.session, message.leases)
        self._forget_departed(caller.session)
        self._settle()

    def _list_rows(self, caller: Caller, message: ListRows) -> Rows:
        del caller
        return self._ledger.list_rows(message.partition, message.where)

    def _stats(self, caller: Caller, message: GetStats) -> None:
        """The units answer after all releases sent before, so the numbers include every earlier clear."""
        del message
        answers: list[UnitStats] = []

        def collect(answer: Answer) -> None:
            assert isinstance(answer, UnitStats)
            answers.append(answer)
            if len(answers) == len(self._units):
                used, capacity = sum(a.bytes_used for a in answers), sum(a.bytes_capacity for a in answers)
                self.server.answer(caller, Stats(self._ledger.row_counts(), used, capacity))

        for unit in self._units:
            unit.send(GetUnitStats(), collect)

    # -- waiting
    def _wait_ready(self, caller: Caller, message: WaitReady) -> Rows | None:
        session = self._session(caller)
        waiter = Waiter(
            partition=message.partition,
            count=message.count,
            fields=message.fields,
            where=message.where,
            task=message.task,
            token=caller,
        )
        rows = self._ledger.wait(waiter)
        if rows is not None:
            return rows
        timer = self.reactor.call_later(message.timeout_s, lambda: self._wait_over(caller, message.timeout_s))
        session.waiting[caller.request] = (waiter, timer)
        return None

    def _wait_over(self, caller: Caller, timeout_s: float) -> None:
        waiter, _ = self._sessions[caller.session].waiting.pop(caller.request)
        self._ledger.forget(waiter)
        text = (
            f"Only {len(waiter.ready)} of {waiter.count} rows of partition {waiter.partition!r} were ready (fields "
            f"{list(waiter.fields)}, where {dict(waiter.where)}, task {waiter.task!r}) within {timeout_s:g} s; raise the deadline or look "
            "at who should write them."
        )
        self.server.fail(caller, PlaneTimeout(text))

    def _give_back(self, caller: Caller, message: GiveBack) -> None:
        del caller
        if len(message.uids) % 8:
            raise WireError("GiveBack.uids must hold int64 numbers.")
        uids = np.unique(np.frombuffer(message.uids, "<i8"))
        self._serve(self._ledger.give_back(message.partition, message.task, uids))

    def _cancel(self, caller: Caller, message: Cancel) -> Done:
        session = self._sessions.get(caller.session)
        waiting = session.waiting.pop(message.request, None) if session is not None else None
        if waiting is not None:
            waiter, timer = waiting
            timer.cancel()
            self._ledger.forget(waiter)
        return Done()

    def _serve(self, served: list[tuple[Waiter, Rows]]) -> None:
        for waiter, rows in served:
            caller = waiter.token
            assert isinstance(caller, Caller)
            self._sessions[caller.session].waiting.pop(caller.request)[1].cancel()
            self.server.answer(caller, rows)

    # -- storage
    def _settle(self) -> None:
        """Tell the units what the last change made free, and have sparse blocks compacted."""
        released: dict[int, list[int]] = {}
        for ref in self._ledger.blocks.take_released():
            released.setdefault(ref.unit, []).append(ref.id)
        for unit, blocks in released.items():
            self._units[unit].send(Release(tuple(blocks)))
        if released:
            self._ledger.blocks.retry_compactions()
        for block in self._ledger.blocks.take_sparse():
            self._compact(block, self._ledger.plan_compaction(block))

    def _compact(self, block: Block, plan: Compact) -> None:
        def finish(answer: Answer) -> None:
            new = answer if isinstance(answer, Compacted) else Compacted(None, b"", no_gain=True)
            self._ledger.end_compaction(block, plan, new)
            self._settle()

        self._units[block.ref.unit].send(plan, finish)
