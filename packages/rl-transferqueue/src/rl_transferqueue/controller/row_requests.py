"""Requests about rows: put, get, list, wait, claim and clear."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from rl_protocol.errors import DataLostError, PlaneTimeout, RLError, WireError
from rl_transferqueue.controller.block_cleanup import BlockCleanup
from rl_transferqueue.controller.column_counters import ColumnCounters
from rl_transferqueue.controller.durable.consumed_rows import Consumed, ConsumedRows
from rl_transferqueue.controller.durable.durable_rows import DurableRows
from rl_transferqueue.controller.durable.remote_digests import RemoteDigests
from rl_transferqueue.controller.durable.row_loads import RowLoads
from rl_transferqueue.controller.memory_accounting.capacity import Capacity
from rl_transferqueue.controller.memory_requests import MemoryRequests, Replies
from rl_transferqueue.controller.rows.block_table import Block
from rl_transferqueue.controller.rows.ledger import Ledger
from rl_transferqueue.controller.rows.waiters import Served, Waiter, Watcher
from rl_transferqueue.controller.sessions import Sessions
from rl_transferqueue.controller.unacknowledged import TakenRows
from rl_transferqueue.transport.control_server import Caller, Handler
from rl_transferqueue.wire.arrays import Ints, pack_ints, unpack_ints
from rl_transferqueue.wire.messages import (
    NOTICE,
    Changes,
    Claim,
    Clear,
    Cleared,
    Commit,
    Committed,
    Done,
    FindHosts,
    GetConsumption,
    GetProduction,
    HostBytes,
    ListRows,
    Locate,
    Located,
    Recall,
    Recalled,
    ResetConsumption,
    Revoked,
    Rows,
    Unload,
    WaitReady,
    Watch,
)


class RowRequests:
    """Answers from the ledger.

    Rows that are handed out can be given back until their caller has the answer.
    """

    def __init__(
        self,
        ledger: Ledger,
        capacity: Capacity,
        memory: MemoryRequests,
        cleanup: BlockCleanup,
        sessions: Sessions,
        replies: Replies,
        digests: RemoteDigests,
    ) -> None:
        self._ledger = ledger
        self._capacity = capacity
        self._memory = memory
        self._cleanup = cleanup
        self._sessions = sessions
        self._replies = replies
        self._digests = digests
        self.columns = ColumnCounters()
        self.durable: DurableRows | None = None
        """Set where puts must survive the plane."""
        self.consumed: ConsumedRows | None = None
        """Set where a successor must know which rows were consumed."""

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """Message type -> its handler."""
        ledger = self._ledger
        return {
            Commit: self._commit,
            Recall: lambda caller, its: self._sessions.get(caller.session).puts.recall(its.request, caller.request),
            Clear: self._clear,
            Unload: lambda _, message: self._unload(message),
            Locate: self._locate,
            ListRows: lambda _, its: ledger.list_rows(its.partition, its.where, its.fields, its.task, its.keys),
            Watch: self._watch,
            WaitReady: self._wait_ready,
            Claim: self._claim,
            GetConsumption: lambda _, its: ledger.consumption(its.partition, its.task),
            GetProduction: lambda _, its: ledger.production(its.partition, its.fields),
            FindHosts: lambda _, message: self._find_hosts(message),
            ResetConsumption: lambda _, message: self._reset_consumption(message),
        }

    def serve(self, served: Served) -> None:
        """Answer those whose wait a change has ended."""
        for who, answer in served:
            assert isinstance(who.token, Caller)
            self._sessions.unpark(who.token)
            if isinstance(who, Waiter) and isinstance(answer, Rows):
                self._hand_out(who.token, who.partition, who.task, answer)
            self._replies.answer(who.token, answer)

    def give_back(self, taken: TakenRows) -> None:
        """Rows whose caller left without the answer can be handed out again."""
        if self.consumed is not None:
            self.consumed.give_back(Consumed(taken.partition, taken.task, taken.generations))
        self.serve(self._ledger.give_back(taken.partition, taken.task, taken.generations))

    def resume(self, consumed: ConsumedRows, session: bytes, unanswered: Collection[int]) -> None:
        """A session of the controller before continues; rows of these requests did not reach their
        callers, and can be handed out again."""
        requests = consumed.unconfirmed(session)
        self._give_back_requests(consumed, session, [it for it in requests if it in unanswered])
        consumed.confirm(session, requests)

    def end_absent(self, consumed: ConsumedRows, session: bytes) -> None:
        """A session of the controller before does not continue: rows that were on their way to it
        can be handed out again."""
        self._give_back_requests(consumed, session, consumed.unconfirmed(session))
        consumed.end_session(session, gone=False)

    def _give_back_requests(self, consumed: ConsumedRows, session: bytes, requests: Collection[int]) -> None:
        for request in requests:
            for its in consumed.of(session, request):
                self.give_back(TakenRows(*its))

    def committed(self, caller: Caller, message: Commit, generations: Ints | range, served: Served) -> None:
        """Part of `Outcomes`."""
        session = self._sessions.find(caller.session)
        waits = session is not None and not session.puts.has_left(caller.request)
        spare = self._memory.spare(caller, message.spare) if waits else None
        if message.block is not None:
            self.columns.put(message.header)
        packed = pack_ints(generations)
        self._replies.answer(caller, Committed(packed, spare))
        self._end_put(caller, packed)
        self.cleared(served)
        self._memory.serve()

    def failed(self, caller: Caller, error: RLError) -> None:
        """Part of `Outcomes`."""
        self._replies.fail(caller, error)
        self._end_put(caller, None)

    def _end_put(self, caller: Caller, generations: bytes | None) -> None:
        session = self._sessions.find(caller.session)
        for request in session.puts.end(caller.request, generations) if session is not None else ():
            self._replies.answer(Caller(caller.session, request), Recalled(generations is not None, generations or b""))

    def gone(self, generations: Sequence[int]) -> None:
        """Part of `Outcomes`."""
        if self.consumed is not None and generations:
            self.consumed.forget(generations)

    def cleared(self, served: Served) -> None:
        """Part of `Outcomes`."""
        self.serve(served)
        self._cleanup.run()

    def freed(self) -> None:
        """Part of `Outcomes`."""
        self._memory.serve()

    def short(self) -> None:
        """Part of `Outcomes`."""
        self._memory.ask_holders()

    def _commit(self, caller: Caller, message: Commit) -> Committed | None:
        session = self._sessions.get(caller.session)
        if self.durable is not None:
            self.durable.put(caller, message)
            session.puts.begin(caller.request)
            return None
        if message.block is not None:
            self._capacity.check(caller.session, message.block)
        generations, served = self._ledger.commit(
            message.partition, message.keys, message.tags, message.block, message.header, message.expect
        )
        if message.block is not None:
            self._capacity.commit(caller.session, message.block)
            self.columns.put(message.header)
        self.serve(served)
        self._cleanup.run()
        packed = pack_ints(generations)
        session.puts.end(caller.request, packed)
        return Committed(packed, self._memory.spare(caller, message.spare))

    def _clear(self, caller: Caller, message: Clear) -> Cleared | None:
        if self.durable is not None:
            self.durable.clear(caller, message)
            return None
        count, served = self._ledger.clear(message.partition, message.keys)
        self.serve(served)
        self._cleanup.run()
        return Cleared(count)

    def _unload(self, message: Unload) -> Done:
        if self.durable is not None:
            self._ledger.unload(message.partition, message.keys)
            self._cleanup.run()
        return Done()

    def _locate(self, caller: Caller, message: Locate) -> Located | None:
        if self.durable is not None:
            if self.durable.drop_damaged(message.partition, message.keys, message.fields):
                self._cleanup.run()
            if elsewhere := self.durable.elsewhere(message.partition, message.keys, message.fields):
                self._compare(self.durable, elsewhere, caller, message)
                return None
            return self._locate_whole(self.durable, caller, message)
        return self._place(caller, message)

    def _compare(self, durable: DurableRows, blocks: Sequence[Block], caller: Caller, message: Locate) -> None:
        """Answer a request once the units of other hosts have compared its blocks, unless its
        caller leaves before."""

        def compared(different: Sequence[Block]) -> None:
            self._sessions.unpark(caller)
            durable.drop_different(different)
            self._cleanup.run()
            try:
                located = self._locate_whole(durable, caller, message)
            except RLError as error:
                self._replies.fail(caller, error)
                return
            if located is not None:
                self._replies.answer(caller, located)

        def expired() -> None:
            units = sorted({block.ref.span.unit for block in blocks})
            self._replies.fail(
                caller,
                PlaneTimeout(
                    f"Storage units {units} of other hosts did not compare rows of partition {message.partition!r} with the digests of "
                    f"their puts within {message.timeout_s:.3g} s. Raise TransferQueueConfig.timeout_s, or set TransferQueueConfig.verify=False."
                ),
            )

        self._sessions.park(caller, message.timeout_s, lambda: self._digests.leave(caller), expired)
        self._digests.compare(caller, blocks, compared)

    def _locate_whole(self, durable: DurableRows, caller: Caller, message: Locate) -> Located | None:
        """Answer a request whose damaged rows have left memory."""
        if self._ledger.on_disk(message.partition, message.keys, message.fields).size:
            self._load(durable.loads, caller, message)
            return None
        return self._place(caller, message)

    def _load(self, loads: RowLoads, caller: Caller, message: Locate) -> None:
        """Answer a request once its rows are in memory, unless its caller leaves before."""
        self._sessions.get(caller.session)
        load = loads.start(
            message.partition, message.keys, message.fields, lambda error: self._loaded(caller, message, error)
        )

        def expired() -> None:
            self._replies.fail(caller, loads.late(load, message.partition, message.timeout_s, self._memory.occupancy()))
            self._memory.serve()

        self._sessions.park(caller, message.timeout_s, lambda: loads.leave(load), expired)

    def _loaded(self, caller: Caller, message: Locate, error: RLError | None) -> None:
        """Answer a request whose rows were read from the journal."""
        self._sessions.unpark(caller)
        try:
            if error is not None:
                raise error
            if self._ledger.on_disk(message.partition, message.keys, message.fields).size:
                raise DataLostError(
                    f"Rows of partition {message.partition!r} are damaged in the journal of the data plane; put them again."
                )
            self._replies.answer(caller, self._place(caller, message))
        except RLError as failure:
            self._replies.fail(caller, failure)

    def _place(self, caller: Caller, message: Locate) -> Located:
        self._sessions.get(caller.session)
        generations = _numbers(message.generations) if message.generations else None
        if generations is not None and generations.size != len(message.keys):
            raise WireError("Locate.generations must hold one number per key, or nothing.")
        located = self._ledger.locate(
            caller.session, message.lease, message.partition, message.keys, message.fields, generations
        )
        self.columns.located(message.fields, len(message.keys))
        if self.durable is not None and (self._memory.waiting or self.durable.loads.short):
            blocks = tuple(ref.id for ref in located.blocks)
            self._replies.answer(Caller(caller.session, NOTICE), Revoked(blocks))
        return located

    def _find_hosts(self, message: FindHosts) -> HostBytes:
        hosts = self._capacity.hosts
        names = tuple(dict.fromkeys(hosts.values()))
        found = np.zeros((len(message.keys), len(names)), np.int64)
        for unit, nbytes in self._ledger.bytes_by_unit(message.partition, message.keys).items():
            found[:, names.index(hosts[unit])] += nbytes
        return HostBytes(names, found.astype("<i8").tobytes())

    def _watch(self, caller: Caller, message: Watch) -> Changes | None:
        watcher = Watcher(partition=message.partition, since=message.since, where=message.where, token=caller)
        if message.timeout_s <= 0:
            return self._ledger.waiters.changes(watcher)
        self._sessions.get(caller.session)
        changes = self._ledger.waiters.watch(watcher)
        if changes is None:
            self._sessions.park(
                caller,
                message.timeout_s,
                lambda: self._ledger.waiters.forget(watcher),
                lambda: self._replies.answer(caller, self._ledger.waiters.changes(watcher)),
            )
        return changes

    def _wait_ready(self, caller: Caller, message: WaitReady) -> Rows | None:
        self._sessions.get(caller.session)
        waiter = Waiter(
            partition=message.partition,
            count=message.count,
            fields=message.fields,
            where=message.where,
            task=message.task,
            token=caller,
        )
        rows = self._ledger.waiters.wait(waiter)
        if rows is None:
            self._sessions.park(
                caller,
                message.timeout_s,
                lambda: self._ledger.waiters.forget(waiter),
                lambda: self._replies.fail(caller, _too_few(waiter, message.timeout_s)),
            )
            return None
        return self._hand_out(caller, message.partition, message.task, rows)

    def _claim(self, caller: Caller, message: Claim) -> Rows:
        self._sessions.get(caller.session)
        rows = self._ledger.claim(message.partition, message.keys, message.task)
        return self._hand_out(caller, message.partition, message.task, rows)

    def _reset_consumption(self, message: ResetConsumption) -> Cleared:
        generations, served = self._ledger.reset_consumption(message.partition, message.task, message.keys)
        for session in self._sessions.live():
            session.unacknowledged.forget(message.partition, message.task, generations)
        if self.consumed is not None and message.task is None:
            self.consumed.forget(generations.tolist())
        elif self.consumed is not None and message.task is not None:
            self.consumed.give_back(Consumed(message.partition, message.task, generations))
        self.serve(served)
        return Cleared(generations.size)

    def _hand_out(self, caller: Caller, partition: str, task: str | None, rows: Rows) -> Rows:
        """Remember rows that were consumed for the caller: they are given back if it leaves without
        the answer."""
        if task is not None:
            taken = TakenRows(partition, task, np.unique(unpack_ints(rows.generations, len(rows.keys))))
            self._sessions.get(caller.session).unacknowledged.add(caller.request, taken)
            if self.consumed is not None:
                self.consumed.take(Consumed(partition, task, taken.generations), *caller)
        return rows


def _numbers(packed: bytes) -> Ints:
    if len(packed) % 8:
        raise WireError("Generation numbers must be int64.")
    return np.frombuffer(packed, "<i8")


def _too_few(waiter: Waiter, timeout_s: float) -> PlaneTimeout:
    return PlaneTimeout(
        f"Only {waiter.ready} of {waiter.count} rows of partition {waiter.partition!r} were ready (fields {list(waiter.fields)}, where "
        f"{dict(waiter.where)}, task {waiter.task!r}) within {timeout_s:g} s; raise the deadline or look at who should write them."
    )
