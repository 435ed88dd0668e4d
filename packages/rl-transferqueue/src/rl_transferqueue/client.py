"""The client of a plane: the DataPlane port over control messages and shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import msgspec

from rl_protocol.batch import BatchData
from rl_protocol.errors import BatchError, CapacityTimeout, DuplicateKeyError, PlaneLostError, RLError
from rl_protocol.meta import KVBatchMeta, Scalar, Tag
from rl_protocol.ports import PlaneStats, Traffic
from rl_protocol.wire import Header, plan
from rl_transferqueue.channel import Channel
from rl_transferqueue.descriptor import PlaneDescriptor
from rl_transferqueue.leases import Leases
from rl_transferqueue.liveness import this_process
from rl_transferqueue.messages import (
    Allocate,
    Allocated,
    BlockRef,
    Bye,
    Cancel,
    Clear,
    Cleared,
    Commit,
    Done,
    GetStats,
    GiveBack,
    Hello,
    ListRows,
    Locate,
    Located,
    Rows,
    Stats,
    WaitReady,
)
from rl_transferqueue.reader import assemble
from rl_transferqueue.routes import LocalRoute, routes

T = TypeVar("T")

_GRACE_S = 1.0
"""How much longer than the caller's deadline we wait for a server that keeps the deadline itself and explains it."""
_SCALARS = (bool, int, float, str, type(None))
_OFF_LOOP_BYTES = 8 << 20
"""From this size on memory is copied in a thread, so that the loop goes on."""


class _Grant(NamedTuple):
    unit: Channel
    ticket: int
    """Id of the request; cancelling it gives the block back."""
    block: BlockRef


async def connect(descriptor: PlaneDescriptor, *, timeout_s: float = 10.0) -> Client:
    """Connect this process to a plane; the client belongs to the running loop.

    Raises:
        PlaneLostError: a process of the plane does not run.
        PlaneTimeout: the controller did not answer within `timeout_s` seconds.
    """
    client = Client(descriptor)
    try:
        await client.open(timeout_s)
    except BaseException:
        await client.close(flush_s=0.0)
        raise
    return client


class Client:
    """One session with a plane (see `rl_protocol.ports.DataPlane`); made by `connect`.

    Lifecycle: connected until `close`, or until a process of the plane dies: then every call, also those under way, raises PlaneLostError.
    Batches that `get` returns are views of shared memory wherever the rows asked for lie side by side in one block. They never change, and
    they keep their block from being used again: while memory is scarce, hold them no longer than needed, or copy them.
    """

    def __init__(self, descriptor: PlaneDescriptor) -> None:
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        session = b"\x01" + os.urandom(7)
        self._routes = routes(descriptor, session)
        self._controller, *self._units = [
            Channel(self._loop, way.address, session, way.name, way.key) for way in self._routes
        ]
        self._memories = [way.memory() for way in self._routes[1:]]
        self._next_unit = session[1] % len(self._units)
        self._leases = Leases(self._loop, self._controller)
        self._watched: list[int] = []
        self._put_ids = 0
        self._written = 0
        self._read = 0
        self._closed = False

    async def open(self, timeout_s: float) -> None:
        """Part of `connect`."""
        deadline = self._loop.time() + timeout_s
        for way in self._routes:
            lifeline = await way.lifeline(self._left(deadline))
            self._watched.append(lifeline)
            self._loop.add_reader(lifeline, self._lose, way.lost)
        hello = Hello(this_process() if isinstance(self._routes[0], LocalRoute) else None)
        await self._controller.call(hello, Done, self._left(deadline))

    # -- DataPlane
    async def put(
        self,
        partition: str,
        keys: Sequence[str],
        data: BatchData | None = None,
        *,
        tags: Sequence[Tag] | None = None,
        timeout_s: float | None = None,
    ) -> KVBatchMeta:
        """See rl_protocol.ports.DataPlane.put. A batch that no storage unit could ever hold raises BatchError at once."""
        deadline = self._loop.time() + self._seconds(timeout_s)
        keys = tuple(keys)
        _check_put(keys, data, tags)
        fields = data.field_names if data is not None else ()
        if keys:
            spec = plan(data) if data is not None and fields else None
            own_tags = tuple(tags) if tags is not None else None
            self._put_ids += 1
            commit = Commit(self._put_ids, partition, keys, own_tags)
            if data is None or spec is None:
                call = self._controller.start(commit)
            else:
                unit, ticket, block = await self._allocate(spec.payload, deadline)
                try:
                    await self._write(data, spec, block, deadline)
                    header = msgspec.msgpack.encode(spec)
                    call = self._controller.start(msgspec.structs.replace(commit, block=block, header=header))
                except BaseException:
                    _cancel(unit, ticket)
                    raise
            await self._controller.finish(call, Done, self._left(deadline))
        self._written += data.nbytes if data is not None else 0
        return KVBatchMeta(partition=partition, keys=keys, tags=tuple(dict(tag) for tag in tags or ()), fields=fields)

    async def get(
        self, meta: KVBatchMeta, fields: Sequence[str] | None = None, *, timeout_s: float | None = None
    ) -> BatchData:
        """See rl_protocol.ports.DataPlane.get."""
        names = tuple(dict.fromkeys(meta.fields if fields is None else fields))
        if not meta.keys:
            return BatchData({}, 0)
        self._leases.flush()
        deadline = self._loop.time() + self._seconds(timeout_s)
        lease, anchor = self._leases.new()
        call = self._controller.start(Locate(lease, meta.partition, meta.keys, names))
        located = await self._controller.finish(call, Located, self._left(deadline))
        if not names:
            return BatchData({}, len(meta))
        size = sum(ref.nbytes for ref in located.blocks)
        remote = any(self._memories[ref.unit].remote for ref in located.blocks)
        left = self._left(deadline)
        batch = await self._copying(size, remote, lambda: assemble(located, names, self._memories, anchor, left))
        self._read += batch.nbytes
        return batch

    async def wait_ready(
        self,
        partition: str,
        *,
        count: int,
        fields: Sequence[str] = (),
        where: Mapping[str, Scalar] | None = None,
        task: str | None = None,
        timeout_s: float,
    ) -> KVBatchMeta:
        """See rl_protocol.ports.DataPlane.wait_ready. Rows handed to a caller that was cancelled are handed out again."""
        if count < 0:
            raise BatchError(f"wait_ready needs count >= 0; got {count}.")

        def give_back(rows: Rows) -> None:
            if task is not None:
                with contextlib.suppress(PlaneLostError):
                    self._controller.tell(GiveBack(partition, task, rows.uids))

        seconds = self._seconds(timeout_s)
        wish = WaitReady(partition, count, tuple(fields), dict(where or {}), task, seconds)
        rows = await self._controller.call(wish, Rows, seconds + _GRACE_S, orphan=give_back)
        return _meta(partition, rows)

    async def list_rows(
        self, partition: str, *, where: Mapping[str, Scalar] | None = None, timeout_s: float | None = None
    ) -> KVBatchMeta:
        """See rl_protocol.ports.DataPlane.list_rows."""
        rows = await self._controller.call(ListRows(partition, dict(where or {})), Rows, self._seconds(timeout_s))
        return _meta(partition, rows)

    async def clear(self, partition: str, keys: Sequence[str] | None = None, *, timeout_s: float | None = None) -> int:
        """See rl_protocol.ports.DataPlane.clear."""
        wish = Clear(partition, None if keys is None else tuple(keys))
        return (await self._controller.call(wish, Cleared, self._seconds(timeout_s))).count

    async def stats(self, *, timeout_s: float | None = None) -> PlaneStats:
        """See rl_protocol.ports.DataPlane.stats. Blocks that readers still hold, and those not committed yet, count as used."""
        self._leases.flush()
        stats = await self._controller.call(GetStats(), Stats, self._seconds(timeout_s))
        return PlaneStats(rows=stats.rows, bytes_used=stats.bytes_used, bytes_capacity=stats.bytes_capacity)

    def traffic(self) -> Traffic:
        """See rl_protocol.ports.DataPlane.traffic."""
        return Traffic(
            control_sent=sum(channel.bytes_sent for channel in self._channels),
            control_received=sum(channel.bytes_received for channel in self._channels),
            data_written=self._written,
            data_read=self._read,
        )

    async def close(self, *, flush_s: float = 1.0) -> None:
        """See rl_protocol.ports.DataPlane.close. Views that are still in use stay valid and keep their blocks.

        Args:
            flush_s: seconds the controller has to take notice of the end.
        """
        if self._closed:
            return
        self._closed = True
        self._leases.flush()
        if flush_s > 0:
            with contextlib.suppress(RLError):
                await self._controller.call(Bye(), Done, flush_s)
        for pidfd in self._watched:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        for unit in self._units:
            unit.close()
        for memory in self._memories:
            memory.close()
        self._controller.mute()
        self._leases.detach()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- inner
    @property
    def _channels(self) -> tuple[Channel, ...]:
        return (self._controller, *self._units)

    def _seconds(self, timeout_s: float | None) -> float:
        return min(max(0.0, self._descriptor.timeout_s if timeout_s is None else timeout_s), 1e9)

    def _left(self, deadline: float) -> float:
        return max(0.0, deadline - self._loop.time())

    def _lose(self, message: str) -> None:
        for pidfd in self._watched:
            self._loop.remove_reader(pidfd)
        for channel in self._channels:
            channel.lose(message)
        for memory in self._memories:
            memory.close()

    async def _allocate(self, nbytes: int, deadline: float) -> _Grant:
        """A block of some unit and the ticket to give it back with: the next unit that has room, else the first to get some."""
        self._next_unit += 1
        turn = self._next_unit % len(self._units)
        full: CapacityTimeout | None = None
        for unit in (*self._units[turn:], *self._units[:turn]):
            try:
                return await self._allocate_on(unit, nbytes, 0.0, self._left(deadline))
            except CapacityTimeout as error:
                full = error
        assert full is not None
        return await self._allocate_anywhere(nbytes, deadline)

    async def _allocate_anywhere(self, nbytes: int, deadline: float) -> _Grant:
        """Wait at all units at once; what the others give after the first is given back."""
        left = self._left(deadline)
        tasks = [asyncio.ensure_future(self._allocate_on(unit, nbytes, left, left + _GRACE_S)) for unit in self._units]
        winner = None
        waiting = set(tasks)
        try:
            while waiting and winner is None:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                winner = next((task for task in done if task.exception() is None), None)
            return (winner or tasks[0]).result()
        finally:
            for task in tasks:
                if task is not winner:
                    task.cancel()
                    task.add_done_callback(_give_back)

    async def _allocate_on(self, unit: Channel, nbytes: int, wait_s: float, timeout_s: float) -> _Grant:
        call = unit.start(Allocate(nbytes, wait_s))
        return _Grant(unit, call.id, (await unit.finish(call, Allocated, timeout_s)).block)

    async def _write(self, data: BatchData, spec: Header, block: BlockRef, deadline: float) -> None:
        memory, left = self._memories[block.unit], self._left(deadline)
        await self._copying(spec.payload, memory.remote, lambda: memory.write(block, spec, data, left))

    async def _copying(self, nbytes: int, remote: bool, copy: Callable[[], T]) -> T:
        if nbytes < _OFF_LOOP_BYTES and not remote:
            return copy()
        done = self._loop.run_in_executor(None, copy)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if remote:
                done.add_done_callback(_forget)  # the unit drops what still arrives
            else:
                await asyncio.wait((done,))  # nobody may get the memory while the thread writes to it
            raise


def _forget(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()


def _cancel(unit: Channel, ticket: int) -> None:
    with contextlib.suppress(PlaneLostError):
        unit.tell(Cancel(ticket))


def _give_back(task: asyncio.Task[_Grant]) -> None:
    if not task.cancelled() and task.exception() is None:
        _cancel(task.result().unit, task.result().ticket)


def _meta(partition: str, rows: Rows) -> KVBatchMeta:
    return KVBatchMeta(partition=partition, keys=rows.keys, tags=rows.tags, fields=rows.fields)


def _check_put(keys: Sequence[str], data: BatchData | None, tags: Sequence[Tag] | None) -> None:
    if len(set(keys)) != len(keys):
        seen: set[str] = set()
        twice = next(key for key in keys if key in seen or seen.add(key))
        raise DuplicateKeyError(f"Key {twice!r} occurs more than once in one put; keys must be unique.")
    for what, size in (
        ("rows of data", len(keys) if data is None else len(data)),
        ("tags", len(keys) if tags is None else len(tags)),
    ):
        if size != len(keys):
            raise BatchError(f"A put needs one row per key: {len(keys)} keys, {size} {what}.")
    for key, tag in zip(keys, tags or (), strict=False):
        for name, value in tag.items():
            if not isinstance(value, _SCALARS):  # pyright: ignore[reportUnnecessaryIsInstance] - callers are not all type-checked
                raise BatchError(f"Tag {name!r} of row {key!r} must be a bool, int, float, str or None; got {value!r}.")
