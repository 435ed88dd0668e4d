"""The controller: ledger and space behind a socket. It parks who waits, watches the processes of clients and units, and has blocks copied."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from rl_protocol.errors import CapacityTimeout, PlaneTimeout, WireError
from rl_transferqueue.allocator import ALIGN, rounded
from rl_transferqueue.blocks import Block
from rl_transferqueue.board import SharedBoard
from rl_transferqueue.bulk import hang_up
from rl_transferqueue.bulk_server import BulkServer
from rl_transferqueue.handouts import Taken, TakenRows
from rl_transferqueue.hosts import Endpoints, endpoint
from rl_transferqueue.keys import PlaneKey
from rl_transferqueue.ledger import Ledger, Served, Waiter, Watcher
from rl_transferqueue.liveness import ProcessId, open_pidfd
from rl_transferqueue.memory_queue import MemoryQueue
from rl_transferqueue.messages import (
    NOTICE,
    Abandon,
    Answer,
    Bye,
    Cancel,
    Changes,
    Claim,
    Clear,
    Cleared,
    Commit,
    Committed,
    Copy,
    Done,
    Fence,
    Flags,
    Free,
    GetConsumption,
    GetMetrics,
    GetProduction,
    GetStats,
    Hello,
    ListRows,
    Locate,
    Located,
    Measure,
    Measured,
    Metrics,
    Reclaim,
    ReleaseLeases,
    Reserve,
    Reserved,
    ResetConsumption,
    Revoked,
    Rows,
    Span,
    Stats,
    WaitReady,
    Watch,
)
from rl_transferqueue.occupancy import Occupancy, by_client
from rl_transferqueue.reactor import Reactor
from rl_transferqueue.server import Caller, Server
from rl_transferqueue.session import Session, Waiting
from rl_transferqueue.space import Space, no_units
from rl_transferqueue.table import Ints
from rl_transferqueue.tally import ColumnTally
from rl_transferqueue.unit_link import UnitLink

log = logging.getLogger(__name__)


class Controller:
    """State and handlers of the controller."""

    def __init__(
        self,
        address: str,
        units: Sequence[str],
        unit_bytes: int,
        segment: int,
        *,
        stored: bool = False,
    ) -> None:
        """`stored`: blocks lie in a backend's stores, see `stored`, and not in arenas."""
        self.reactor = Reactor()
        self._board = SharedBoard(len(units) * unit_bytes // ALIGN + 1)
        self._ledger = Ledger(self._board)
        self._space = Space(len(units), unit_bytes)
        self._columns = ColumnTally()
        self._sessions: dict[bytes, Session] = {}
        self._departed: dict[bytes, Session] = {}
        """Ended sessions that still hold leases."""
        self._bulk: BulkServer | None = None
        self._stored = stored
        self._puts = MemoryQueue[Caller]()
        """Puts that wait for memory."""
        self._units = {
            i: UnitLink(self.reactor, unit, segment, self._check_ready, partial(self._lose_unit, i))
            for i, unit in enumerate(units)
        }
        self._on_ready: Callable[[], None] | None = None
        self.server = Server(
            self.reactor,
            address,
            {
                Hello: self._hello,
                Bye: self._bye,
                Reserve: self._reserve,
                Abandon: self._abandon,
                Commit: self._commit,
                Locate: self._locate,
                ReleaseLeases: self._release_leases,
                WaitReady: self._wait_ready,
                ListRows: self._list_rows,
                Watch: self._watch,
                Claim: self._claim,
                GetConsumption: self._consumption,
                GetProduction: self._production,
                ResetConsumption: self._reset_consumption,
                Clear: self._clear,
                GetStats: self._stats,
                GetMetrics: self._metrics,
                Cancel: self._cancel,
            },
            on_received=self._received,
            on_end=self._disconnected,
        )

    @property
    def shared_memory(self) -> tuple[int, int]:
        """File descriptor and bytes of what clients map."""
        return self._board.fd, self._board.nbytes

    def listen(self, host: str, key: PlaneKey, port: int = 0) -> Endpoints:
        """Also serve clients of other hosts: control messages at `port`, bytes at the next one; 0: at ports that are free."""
        self._bulk = BulkServer(self.reactor, host, key, port=port and port + 1)
        return Endpoints(self.server.listen(host, key, port), endpoint(host, self._bulk.port))

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call back once, when all units are connected: from then on the end of each is noticed."""
        self._on_ready = callback
        self._check_ready()

    def _check_ready(self) -> None:
        if self._on_ready is not None and all(link.connected for link in self._units.values()):
            callback, self._on_ready = self._on_ready, None
            callback()

    def close(self) -> None:
        """Close all sockets and descriptors."""
        self.server.close()
        if self._bulk is not None:
            self._bulk.close()
        for unit in self._units.values():
            unit.close()
        for session in (*self._sessions.values(), *self._departed.values()):
            os.close(session.pidfd)

    # -- processes
    def _hello(self, caller: Caller, message: Hello) -> Done:
        if caller.session in self._sessions or caller.session in self._departed or len(caller.session) != 8:
            raise WireError("This session exists already, or its identity is not 8 bytes.")
        pidfd = self._lifeline(caller.session, message.process)
        name = f"session {caller.session.hex()} of another host"
        if message.process is not None:
            name = f"pid {message.process.pid}"
        self._sessions[caller.session] = Session(pidfd, message.process is None, name)
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
        self._session(caller)
        self._depart(caller.session)
        return Done()

    def _depart(self, session: bytes) -> None:
        """End a session whose process may still read what it has leased."""
        self._departed[session] = self._sessions[session]
        self._end(session)
        self._forget_departed(session)

    def _drop(self, session: bytes) -> None:
        """End a session that did not say so: rows in answers that did not reach it are handed out again."""
        handouts = self._sessions[session].handouts
        self._depart(session)
        for rows in handouts.pop_rows():
            self._give_back(session, rows)

    def _disconnected(self, session: bytes) -> None:
        """The connection for control messages has ended; the process may live, and so do its leases."""
        if session in self._sessions:
            if self._sessions[session].remote:
                hang_up(self._sessions[session].pidfd)
            self._drop(session)

    def _died(self, session: bytes) -> None:
        if session in self._sessions:
            self._drop(session)
        self._ledger.blocks.release(session)
        self._forget_departed(session)
        self._settle()

    def _forget_departed(self, session: bytes) -> None:
        """A process need not be watched any more once its session has ended and holds nothing."""
        if session in self._departed and not self._ledger.blocks.has_leases(session):
            pidfd = self._departed.pop(session).pidfd
            self.reactor.unwatch(pidfd)
            os.close(pidfd)

    def _end(self, session: bytes) -> None:
        """From here on the session can't commit, so what it has reserved is freed."""
        ended = self._sessions.pop(session)
        for waiting in ended.waiting.values():
            waiting.timer.cancel()
            waiting.leave()
        if ended.remote or self._stored:
            for unit in self._units:
                self._fence(Fence(session, self._space.reserved(session, unit), True, 0), unit)
        else:
            self._space.end_session(session)
            self._serve_puts()

    def _fence(self, fence: Fence, unit: int) -> None:
        """Free spans that a session has reserved in a unit once nothing it sent can arrive there any more."""

        def fenced(answer: Answer) -> None:
            _check_done(answer, fence)
            for span in fence.spans:
                self._space.abandon(fence.session, span)
            self._serve_puts()

        if unit in self._units:  # otherwise the memory is gone, too
            self._units[unit].send(fence, fenced)

    def _session(self, caller: Caller) -> Session:
        session = self._sessions.get(caller.session)
        if session is None:
            raise WireError("This session is not known or has ended; connect again.")
        return session

    def _lose_unit(self, unit: int) -> None:
        """The others go on; what lay in this one is listed as lost."""
        log.error("storage unit %d has ended; its data is lost", unit)
        self._units.pop(unit).close()
        self._space.lose(unit)
        self._serve(self._ledger.lose_unit(unit))
        if not self._units:
            self._fail_puts()
        self._settle()

    # -- waiting
    def _park(self, caller: Caller, seconds: float, leave: Callable[[], None], over: Callable[[], None]) -> None:
        """Answer later; `leave` is called when the caller leaves or its time is up, `over` then answers."""

        def expire() -> None:
            self._unpark(caller)
            leave()
            over()

        waiting = Waiting(self.reactor.call_later(seconds, expire), leave)
        self._session(caller).waiting[caller.request] = waiting

    def _unpark(self, caller: Caller) -> Waiting | None:
        session = self._sessions.get(caller.session)
        waiting = session.waiting.pop(caller.request, None) if session is not None else None
        if waiting is not None:
            waiting.timer.cancel()
        return waiting

    def _cancel(self, caller: Caller, message: Cancel) -> None:
        waiting = self._unpark(Caller(caller.session, message.request))
        if waiting is not None:
            waiting.leave()
        session = self._sessions.get(caller.session)
        taken = session.handouts.pop(message.request) if session is not None else None
        if taken is not None:
            self._give_back(caller.session, taken)
        self._serve_puts()

    def _received(self, session: bytes, requests: Sequence[int]) -> None:
        if session in self._sessions:
            self._sessions[session].handouts.confirm(requests)

    def _give_back(self, session: bytes, taken: Taken) -> None:
        if isinstance(taken, TakenRows):
            self._serve(self._ledger.give_back(taken.partition, taken.task, taken.uids))
        else:
            self._space.abandon(session, taken)

    def _hand_out(self, caller: Caller, partition: str, task: str | None, rows: Rows) -> Rows:
        """Rows that were consumed for the caller: they are given back if it leaves without the answer."""
        if task is not None:
            taken = TakenRows(partition, task, np.unique(_numbers(rows.uids)))
            self._session(caller).handouts.add(caller.request, taken)
        return rows

    def _serve(self, served: Served) -> None:
        for who, answer in served:
            assert isinstance(who.token, Caller)
            self._unpark(who.token)
            if isinstance(who, Waiter) and isinstance(answer, Rows):
                self._hand_out(who.token, who.partition, who.task, answer)
            self.server.answer(who.token, answer)

    # -- writing
    def _reserve(self, caller: Caller, message: Reserve) -> None:
        self._session(caller)
        self._space.check_size(message.nbytes)
        self._puts.add(caller, message.nbytes)
        self._serve_puts()
        if caller not in self._puts:
            return
        if message.timeout_s <= 0:
            self._puts.discard(caller)
            raise self._full(message)

        def over() -> None:
            self.server.fail(caller, self._full(message))
            self._serve_puts()

        self._park(caller, message.timeout_s, lambda: self._puts.discard(caller), over)
        for session in self._space.holders():
            self.server.answer(Caller(session, NOTICE), Reclaim())

    def _take(self, caller: Caller, nbytes: int) -> Span | None:
        return self._space.reserve(caller.session, nbytes)

    def _full(self, message: Reserve) -> CapacityTimeout:
        names = {session: its.name for session, its in (*self._departed.items(), *self._sessions.items())}
        blocks = self._ledger.blocks
        held = Occupancy(
            partitions=blocks.by_partition,
            reserved=by_client(self._space.holders(), names),
            read=by_client(blocks.read_only_by_leases(), names),
            waiting=len(self._puts),
            waiting_bytes=self._puts.nbytes,
        )
        return self._space.full(message.nbytes, message.timeout_s, held)

    def _serve_puts(self) -> None:
        """Give memory to puts that wait for it, see `MemoryQueue`."""
        if not self._puts or not self._units:
            return
        for caller, span in self._puts.serve(self._take):
            self._unpark(caller)
            self._session(caller).handouts.add(caller.request, span)
            self.server.answer(caller, Reserved(span))
        self._keep_ahead()

    def _fail_puts(self) -> None:
        """No storage unit is left."""
        for caller in self._puts.clear():
            self._unpark(caller)
            self.server.fail(caller, no_units())

    def _abandon(self, caller: Caller, message: Abandon) -> None:
        session = self._session(caller)
        for span in message.spans:
            if message.late:
                session.abandoned += 1
                self._fence(Fence(caller.session, (span,), False, session.abandoned), span.unit)
            else:
                self._space.abandon(caller.session, span)
        self._serve_puts()

    def _commit(self, caller: Caller, message: Commit) -> Committed:
        session = self._session(caller)
        if message.block is not None:
            self._space.check(caller.session, message.block)
        uids, served = self._ledger.commit(
            message.partition, message.keys, message.tags, message.block, message.header, message.expect
        )
        if message.block is not None:
            self._space.commit(caller.session, message.block)
            self._columns.put(message.header)
        self._serve(served)
        self._settle()
        spare = None
        if message.spare and not self._puts:
            spare = self._space.spare(caller.session, message.spare)
            self._keep_ahead()
        if spare is not None:
            session.handouts.add(caller.request, spare)
        return Committed(uids.astype("<i8").tobytes(), spare)

    def _clear(self, caller: Caller, message: Clear) -> Cleared:
        del caller
        count, served = self._ledger.clear(message.partition, message.keys)
        self._serve(served)
        self._settle()
        return Cleared(count)

    # -- reading
    def _locate(self, caller: Caller, message: Locate) -> Located:
        self._session(caller)
        uids = _numbers(message.uids) if message.uids else None
        if uids is not None and uids.size != len(message.keys):
            raise WireError("Locate.uids must hold one number per key, or nothing.")
        located = self._ledger.locate(
            caller.session, message.lease, message.partition, message.keys, message.fields, uids
        )
        self._columns.located(message.fields, len(message.keys))
        return located

    def _release_leases(self, caller: Caller, message: ReleaseLeases) -> None:
        self._ledger.blocks.release(caller.session, message.leases)
        self._forget_departed(caller.session)
        self._settle()

    def _list_rows(self, caller: Caller, message: ListRows) -> Rows:
        del caller
        return self._ledger.list_rows(message.partition, message.where, message.fields, message.task, message.keys)

    def _watch(self, caller: Caller, message: Watch) -> Changes | None:
        watcher = Watcher(partition=message.partition, since=message.since, where=message.where, token=caller)
        if message.timeout_s <= 0:
            return self._ledger.changes(watcher)
        self._session(caller)
        changes = self._ledger.watch(watcher)
        if changes is None:
            self._park(
                caller,
                message.timeout_s,
                lambda: self._ledger.forget(watcher),
                lambda: self.server.answer(caller, self._ledger.changes(watcher)),
            )
        return changes

    def _stats(self, caller: Caller, message: GetStats) -> Stats:
        del caller, message
        ledger, space = self._ledger, self._space
        used, taken = ledger.blocks.used, space.used
        return Stats(
            ledger.row_counts(),
            used,
            max(0, taken - used),
            space.total,
            ledger.lost(),
            ledger.columns(),
            ledger.tasks(),
        )

    def _metrics(self, caller: Caller, message: GetMetrics) -> Metrics:
        del caller, message
        tally = self.server.tally
        waiting = sum(len(session.waiting) for session in self._sessions.values())
        return Metrics(
            tally.operations(),
            tally.errors(),
            self._columns.columns(),
            tally.bytes_sent,
            len(self._sessions),
            waiting,
        )

    # -- consuming
    def _wait_ready(self, caller: Caller, message: WaitReady) -> Rows | None:
        self._session(caller)
        waiter = Waiter(
            partition=message.partition,
            count=message.count,
            fields=message.fields,
            where=message.where,
            task=message.task,
            token=caller,
        )
        rows = self._ledger.wait(waiter)
        if rows is None:
            self._park(
                caller,
                message.timeout_s,
                lambda: self._ledger.forget(waiter),
                lambda: self.server.fail(caller, _too_few(waiter, message.timeout_s)),
            )
            return None
        return self._hand_out(caller, message.partition, message.task, rows)

    def _claim(self, caller: Caller, message: Claim) -> Rows:
        self._session(caller)
        rows = self._ledger.claim(message.partition, message.keys, message.task)
        return self._hand_out(caller, message.partition, message.task, rows)

    def _consumption(self, caller: Caller, message: GetConsumption) -> Flags:
        del caller
        return self._ledger.consumption(message.partition, message.task)

    def _production(self, caller: Caller, message: GetProduction) -> Flags:
        del caller
        return self._ledger.production(message.partition, message.fields)

    def _reset_consumption(self, caller: Caller, message: ResetConsumption) -> Cleared:
        del caller
        uids, served = self._ledger.reset_consumption(message.partition, message.task, message.keys)
        for session in self._sessions.values():
            session.handouts.forget(message.partition, message.task, uids)
        self._serve(served)
        return Cleared(uids.size)

    # -- storage
    def _settle(self) -> None:
        """Do what the last change made necessary: free memory, revoke leases, copy sparse blocks."""
        if not self._ledger.blocks.unsettled:
            return
        released = self._ledger.blocks.take_released()
        if self._stored:
            self._free([ref.span for ref in released])
            released = []
        for ref in released:
            self._space.give(ref.span)
        for session, blocks in self._ledger.blocks.take_revoked().items():
            self.server.answer(Caller(session, NOTICE), Revoked(tuple(blocks)))
        if released:
            self._serve_puts()
            self._ledger.blocks.retry_compactions()
        for block in self._ledger.blocks.take_sparse():
            self._compact(block, self._ledger.plan_compaction(block))

    def _free(self, spans: Sequence[Span]) -> None:
        """Free blocks that a backend holds: their places are not given anew before it has forgotten them."""
        for unit in {span.unit for span in spans} & self._units.keys():
            mine = Free(tuple(span for span in spans if span.unit == unit))

            def freed(answer: Answer, mine: Free = mine) -> None:
                _check_done(answer, mine)
                for span in mine.spans:
                    self._space.give(span)
                self._serve_puts()

            self._units[unit].send(mine, freed)

    def _compact(self, block: Block, plan: Measure) -> None:
        unit = block.ref.span.unit

        def measured(answer: Answer) -> None:
            gain = isinstance(answer, Measured) and rounded(answer.payload) < block.ref.span.nbytes
            target = self._space.take(unit, answer.payload) if isinstance(answer, Measured) and gain else None
            if not isinstance(answer, Measured) or target is None:
                self._ledger.end_compaction(block, plan, None, no_gain=not gain)
                self._settle()
                return

            def copied(done: Answer) -> None:
                ok = isinstance(done, Done)
                if not ok:
                    self._space.give(target)
                self._ledger.end_compaction(block, plan, (target, answer.header) if ok else None, no_gain=not ok)
                self._settle()

            self._units[unit].send(Copy(plan.source, plan.header, plan.rows, plan.fields, target), copied)

        self._units[unit].send(plan, measured)

    def _keep_ahead(self) -> None:
        for unit, link in self._units.items():
            link.keep_ahead(self._space.high_water(unit))


def _check_done(answer: Answer, request: Fence | Free) -> None:
    if not isinstance(answer, Done):
        log.error("a storage unit answered %s to %s", answer, request)


def _numbers(packed: bytes) -> Ints:
    if len(packed) % 8:
        raise WireError("Generation numbers must be int64.")
    return np.frombuffer(packed, "<i8")


def _too_few(waiter: Waiter, timeout_s: float) -> PlaneTimeout:
    return PlaneTimeout(
        f"Only {waiter.ready} of {waiter.count} rows of partition {waiter.partition!r} were ready (fields {list(waiter.fields)}, where "
        f"{dict(waiter.where)}, task {waiter.task!r}) within {timeout_s:g} s; raise the deadline or look at who should write them."
    )
