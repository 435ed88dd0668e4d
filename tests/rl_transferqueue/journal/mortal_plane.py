"""A data plane of one thread whose journal is on a disk that loses power."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
from controller_fakes import no_fetch
from journal_model import opened
from lossy_disk import LossyDisk, PowerLossError
from lossy_files import LossyFiles

from rl_protocol import BatchData, KVBatchMeta, PlaneLostError, RLError, Tag
from rl_protocol.ports import RowChanges
from rl_protocol.wire import plan
from rl_protocol.wire.format import write_payload
from rl_transferqueue.controller.durable.durable_rows import DurableRows
from rl_transferqueue.controller.durable.journal_thread import Done, Found, Read, Wanted
from rl_transferqueue.controller.durable.recovery import restore
from rl_transferqueue.controller.memory_accounting.capacity import Capacity
from rl_transferqueue.controller.rows.ledger import Ledger
from rl_transferqueue.controller.rows.waiters import Served, Watcher
from rl_transferqueue.journal.records import ClearRecord, Record
from rl_transferqueue.transport.control_server import Caller
from rl_transferqueue.wire.arrays import Ints
from rl_transferqueue.wire.messages import Clear, Cleared, Commit, Rows
from rl_transferqueue.wire.spans import Span
from rl_transferqueue.wire.tags import to_columns, to_rows

SESSION = b"session1"
NBYTES = 1 << 20


class MortalPlane:
    """The ledger, `DurableRows` and the journal of a controller, with the methods of a client that
    a `ReplayBuffer` uses. Puts that arrive together share a commit. Without power all calls raise
    PlaneLostError.

    Raises:
        PowerLossError: the power went during the recovery.
    """

    def __init__(self, disk: LossyDisk) -> None:
        self.dead = False
        self._ledger, self._capacity, self._memory = Ledger(), Capacity(1, NBYTES), bytearray(NBYTES)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._requests = 0
        self._queue: list[tuple[Record, Done]] = []
        self._stack = ExitStack()
        with ExitStack() as stack:
            self._journal = stack.enter_context(opened(LossyFiles(disk)))
            recovered = self._journal.recover()
            self._journal.append([ClearRecord(recovered.report.rows_incomplete)])
            self._journal.sync()
            self._stack = stack.pop_all()
        restore(recovered, self._ledger)
        self._rows = DurableRows(self._ledger, self._capacity, self, self._bytes_of, no_fetch, self, self)

    def die(self) -> None:
        """End as if all processes were killed."""
        self.dead = True
        self._stack.close()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(PlaneLostError("killed"))

    # -- a client
    async def put(
        self, partition: str, keys: Sequence[str], data: BatchData | None = None, *, tags: Sequence[Tag], **_: object
    ) -> None:
        message = Commit(partition, tuple(keys), to_columns(keys, tags))
        if data is not None:
            header = plan(data)
            span = self._capacity.reserve(SESSION, header.payload)
            assert span is not None
            write_payload(data, header, self._bytes_of(span))
            message = msgspec.structs.replace(message, block=span, header=msgspec.msgpack.encode(header))
        if keys:
            await self._call(lambda caller: self._rows.put(caller, message))

    async def clear(self, partition: str, keys: Sequence[str] | None = None, **_: object) -> None:
        message = Clear(partition, None if keys is None else tuple(keys))
        await self._call(lambda caller: self._rows.clear(caller, message))

    async def list_rows(
        self, partition: str, *, where: Tag | None = None, keys: Any = None, **_: object
    ) -> KVBatchMeta:
        self._check()
        return _meta(partition, self._ledger.list_rows(partition, where or {}, keys=keys and tuple(keys)))

    async def watch(self, partition: str, *, since: int = 0, **_: object) -> RowChanges:
        def begin(caller: Caller) -> None:
            found = self._ledger.waiters.watch(Watcher(partition=partition, since=since, where={}, token=caller))
            if found is not None:
                self.answer(caller, found)

        found = await self._call(begin)
        return RowChanges(
            rows=_meta(partition, found.rows), removed=found.removed, version=found.version, reset=found.reset
        )

    async def _call(self, begin: Callable[[Caller], None]) -> Any:
        self._check()
        self._requests += 1
        call = self._calls[self._requests] = asyncio.get_running_loop().create_future()
        begin(Caller(SESSION, self._requests))
        return await call

    def _check(self) -> None:
        if self.dead:
            raise PlaneLostError("killed")

    # -- the journal's thread
    def write(self, record: Record, done: Done) -> None:
        self._queue.append((record, done))
        if len(self._queue) == 1:
            asyncio.get_running_loop().call_soon(self._commit)

    def find(self, generations: Sequence[int], wanted: Wanted, done: Found) -> None:
        done(self._journal.find(generations, wanted))

    def read(self, numbers: Sequence[int], done: Read) -> None:
        done(self._journal.read(numbers))

    def _commit(self) -> None:
        batch, self._queue = self._queue, []
        if self.dead:
            return
        try:
            self._journal.append([record for record, _ in batch])
            self._journal.sync()
        except PowerLossError:
            self.die()
            return
        for _, done in batch:
            done(None)

    # -- replies and outcomes
    def answer(self, caller: Caller, body: Any) -> None:
        call = self._calls.pop(caller.request)
        if not call.done():
            call.set_result(body)

    def fail(self, caller: Caller, error: RLError) -> None:
        self._calls.pop(caller.request).set_exception(error)

    def committed(self, caller: Caller, message: Commit, generations: Ints, served: Served) -> None:
        self.answer(caller, Cleared(len(generations)))
        self.cleared(served)

    def cleared(self, served: Served) -> None:
        for who, answer in served:
            self.answer(who.token, answer)

    def failed(self, caller: Caller, error: RLError) -> None:
        self.fail(caller, error)

    def gone(self, generations: Sequence[int]) -> None: ...

    def freed(self) -> None: ...

    def short(self) -> None: ...

    def _bytes_of(self, span: Span) -> memoryview:
        return memoryview(self._memory)[span.offset : span.offset + span.nbytes]


def _meta(partition: str, rows: Rows) -> KVBatchMeta:
    return KVBatchMeta(partition=partition, keys=rows.keys, tags=to_rows(rows.tags, len(rows.keys)))
