"""The client of a plane: the DataPlane port over control messages and shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import numpy as np

from rl_protocol.batch import BatchData
from rl_protocol.draft import Draft, plan_columns
from rl_protocol.errors import BatchError, DuplicateKeyError, PlaneLostError, PlaneTimeout, RLError
from rl_protocol.meta import KVBatchMeta, Scalar, Tag, TagRows, check_where
from rl_protocol.ports import PlaneStats, RowChanges, RowFlags, Traffic
from rl_protocol.schema import ColumnSpec
from rl_protocol.wire import plan
from rl_transferqueue.backends import BUILT_IN
from rl_transferqueue.board import BoardView
from rl_transferqueue.channel import Channel
from rl_transferqueue.descriptor import PlaneDescriptor
from rl_transferqueue.leases import Leases
from rl_transferqueue.liveness import this_process
from rl_transferqueue.locations import Location, Locations, Question
from rl_transferqueue.memory import Writes
from rl_transferqueue.messages import (
    Abandon,
    Answer,
    Bye,
    Changes,
    Claim,
    Clear,
    Cleared,
    Commit,
    Committed,
    Done,
    Flags,
    GetConsumption,
    GetMetrics,
    GetProduction,
    GetStats,
    Hello,
    ListRows,
    Locate,
    Located,
    Metrics,
    Reclaim,
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
from rl_transferqueue.regions import Regions
from rl_transferqueue.routes import route
from rl_transferqueue.space import most_spare
from rl_transferqueue.tags import to_columns, to_rows

T = TypeVar("T")

_GRACE_S = 1.0
"""How much longer than the caller's deadline we wait for a server that keeps the deadline itself and explains it."""
_NOTICE_S = 0.005
"""Between attempts to get memory of a unit that lives: the controller notices the end of a unit on its own."""


async def connect(descriptor: PlaneDescriptor, *, timeout_s: float = 10.0) -> Client:
    """Connect this process to a plane; the client belongs to the running loop.

    Raises:
        PlaneLostError: the controller does not run, or no storage unit does.
        PlaneTimeout: the controller did not answer within `timeout_s` seconds.
    """
    client = Client(descriptor)
    try:
        await client.open(timeout_s)
    except BaseException:
        await client.close(flush_s=0.0)
        raise
    return client


class _ArenaDraft(Draft):
    """A draft in the memory of a unit."""

    span: Span


class Client:
    """One session with a plane (see `rl_protocol.ports.DataPlane`); made by `connect`.

    Lifecycle: connected until `close`, or until the controller or the last storage unit dies: then every call, also those under way, raises
    PlaneLostError. When one of several units dies, the others go on; reads of what lay in it raise DataLostError.
    Batches that `get` returns are views of shared memory wherever the rows asked for lie side by side in one block. They never change, and
    they keep their block from being used again: while memory is scarce, hold them no longer than needed, or copy them.
    """

    def __init__(self, descriptor: PlaneDescriptor) -> None:
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        session = b"\x01" + os.urandom(7)
        self._route = route(descriptor, session)
        self._memory = self._route.memory()
        self._controller = Channel(self._loop, self._route.connect(), "controller", on_notice=self._notice)
        self._leases = Leases(self._loop, self._controller)
        ahead = descriptor.backend in BUILT_IN  # a backend's block has its span for itself
        self._regions = Regions(most_spare(descriptor.units[0].arena_bytes) if ahead else 0)
        self._locations: Locations | None = None
        self._watched: dict[str, int] = {}
        """Name of each process that lives -> what becomes readable when it ends."""
        self._writes = Writes()
        self._written = 0
        self._read = 0
        self._closed = False

    async def open(self, timeout_s: float) -> None:
        """Part of `connect`."""
        deadline = self._loop.time() + timeout_s
        controller, units = self._descriptor.controller, self._descriptor.units
        self._watch_process("controller", await self._route.lifeline(controller, "controller", timeout_s))
        for i, unit in enumerate(units):
            name = f"storage unit {i}"
            try:
                self._watch_process(name, await self._route.lifeline(unit, name, self._left(deadline)), i)
            except PlaneLostError:
                self._regions.lose(i)
                if i == len(units) - 1 and len(self._watched) == 1:
                    raise
        if self._route.here:
            self._locations = Locations(BoardView(controller))
        hello = Hello(this_process() if self._route.here else None)
        await self._controller.call(hello, Done, self._left(deadline))

    # -- writing
    async def put(
        self,
        partition: str,
        keys: Sequence[str],
        data: BatchData | Draft | None = None,
        *,
        tags: Sequence[Tag] | None = None,
        expect: Sequence[Tag | None] | None = None,
        timeout_s: float | None = None,
    ) -> KVBatchMeta:
        """See rl_protocol.ports.DataPlane.put. A batch that no storage unit could ever hold raises BatchError at once."""
        deadline = self._loop.time() + self._seconds(timeout_s)
        keys = tuple(keys)
        _check_put(keys, data, tags, expect)
        fields = data.field_names if data is not None else ()
        uids: tuple[int, ...] = ()
        if keys:
            wish = Commit(
                partition,
                keys,
                to_columns(keys, tags) if tags is not None else (),
                tuple(tags if tags is None else check_where(tags) for tags in expect) if expect is not None else None,
            )
            if isinstance(data, Draft):
                uids = await self._commit_draft(wish, data, deadline)
            elif data is None or not fields:
                uids = await self._commit(wish, None, deadline)
            else:
                uids = await self._commit_batch(wish, data, deadline)
        return KVBatchMeta.listed(partition, keys, tuple(dict(tag) for tag in tags or ()), fields, uids)

    async def alloc(
        self,
        columns: Iterable[ColumnSpec],
        rows: int,
        lengths: Mapping[str, Sequence[int]] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Draft:
        """See rl_protocol.ports.DataPlane.alloc."""
        header, offsets = plan_columns(columns, rows, lengths or {})

        async def make(span: Span) -> Draft:
            memory = self._memory.draft(span, header.payload)
            draft = _ArenaDraft(header, offsets, memory, lambda: self._abandon(span))
            draft.span = span
            return draft

        return await self._with_room(header.payload, self._loop.time() + self._seconds(timeout_s), make)

    async def clear(self, partition: str, keys: Sequence[str] | None = None, *, timeout_s: float | None = None) -> int:
        """See rl_protocol.ports.DataPlane.clear."""
        self._forget(partition)
        wish = Clear(partition, None if keys is None else tuple(keys))
        return (await self._controller.call(wish, Cleared, self._seconds(timeout_s))).count

    # -- reading
    async def get(
        self, meta: KVBatchMeta, fields: Sequence[str] | None = None, *, timeout_s: float | None = None
    ) -> BatchData:
        """See rl_protocol.ports.DataPlane.get. Asks nobody when this client has located the same rows before and they are still there."""
        names = tuple(dict.fromkeys(meta.fields if fields is None else fields))
        if not meta.keys:
            return BatchData({}, 0)
        deadline = self._loop.time() + self._seconds(timeout_s)
        question = (meta.partition, meta.keys, names, meta.generations)
        place = self._locations.find(question) if self._locations is not None else None
        self._controller.check()
        while True:
            if place is None:
                place = await self._locate(question, self._left(deadline))
            if not names:
                return BatchData({}, len(meta))
            try:
                batch = await self._memory.read(place.located, names, place.anchor, self._left(deadline))
            except PlaneLostError:  # a unit has ended: the controller will say so, or where the rows are now
                self._controller.check()
                if not self._left(deadline):
                    raise
                await asyncio.sleep(_NOTICE_S)
                place = None
            else:
                self._read += batch.nbytes
                return batch

    async def list_rows(
        self,
        partition: str,
        *,
        where: Mapping[str, Scalar] | None = None,
        fields: Sequence[str] = (),
        task: str | None = None,
        keys: Sequence[str] | None = None,
        timeout_s: float | None = None,
    ) -> KVBatchMeta:
        """See rl_protocol.ports.DataPlane.list_rows."""
        named = None if keys is None else tuple(keys)
        wish = ListRows(partition, check_where(where or {}), tuple(fields), task, named)
        return _meta(partition, await self._controller.call(wish, Rows, self._seconds(timeout_s)))

    async def watch(
        self, partition: str, *, since: int = 0, where: Mapping[str, Scalar] | None = None, timeout_s: float
    ) -> RowChanges:
        """See rl_protocol.ports.DataPlane.watch."""
        seconds = self._seconds(timeout_s)
        wish = Watch(partition, since, check_where(where or {}), seconds)
        found = await self._controller.call(wish, Changes, seconds + _GRACE_S)
        return RowChanges(
            rows=_meta(partition, found.rows), removed=found.removed, version=found.version, reset=found.reset
        )

    # -- consuming
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

        seconds = self._seconds(timeout_s)
        wish = WaitReady(partition, count, tuple(fields), check_where(where or {}), task, seconds)
        rows = await self._controller.call(wish, Rows, seconds + _GRACE_S, takes=task is not None)
        return _meta(partition, rows)

    async def claim(
        self, partition: str, keys: Sequence[str], *, task: str, timeout_s: float | None = None
    ) -> KVBatchMeta:
        """See rl_protocol.ports.DataPlane.claim."""
        wish = Claim(partition, tuple(keys), task)
        return _meta(partition, await self._controller.call(wish, Rows, self._seconds(timeout_s), takes=True))

    async def consumption_status(self, partition: str, *, task: str, timeout_s: float | None = None) -> RowFlags:
        """See rl_protocol.ports.DataPlane.consumption_status."""
        found = await self._controller.call(GetConsumption(partition, task), Flags, self._seconds(timeout_s))
        return RowFlags(keys=found.keys, flags=np.frombuffer(found.flags, np.bool_))

    async def production_status(
        self, partition: str, *, fields: Sequence[str], timeout_s: float | None = None
    ) -> RowFlags:
        """See rl_protocol.ports.DataPlane.production_status."""
        wish = GetProduction(partition, tuple(fields))
        found = await self._controller.call(wish, Flags, self._seconds(timeout_s))
        flags = np.frombuffer(found.flags, np.bool_).reshape(len(found.keys), len(fields))
        return RowFlags(keys=found.keys, flags=flags)

    async def reset_consumption(
        self,
        partition: str,
        *,
        task: str | None = None,
        keys: Sequence[str] | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """See rl_protocol.ports.DataPlane.reset_consumption."""
        wish = ResetConsumption(partition, task, None if keys is None else tuple(keys))
        return (await self._controller.call(wish, Cleared, self._seconds(timeout_s))).count

    # -- the rest
    async def stats(self, *, timeout_s: float | None = None) -> PlaneStats:
        """See rl_protocol.ports.DataPlane.stats. Blocks that readers still hold count as used."""
        self._forget(None)
        stats = await self._controller.call(GetStats(), Stats, self._seconds(timeout_s))
        return PlaneStats(
            rows=stats.rows,
            bytes_used=stats.bytes_used,
            bytes_reserved=stats.bytes_reserved,
            bytes_capacity=stats.bytes_capacity,
            lost=stats.lost,
            columns=stats.columns,
            tasks=stats.tasks,
        )

    async def metrics(self, *, timeout_s: float | None = None) -> Metrics:
        """What the controller has done for all clients since it began: requests, seconds, errors, bytes by column."""
        return await self._controller.call(GetMetrics(), Metrics, self._seconds(timeout_s))

    def traffic(self) -> Traffic:
        """See rl_protocol.ports.DataPlane.traffic."""
        return Traffic(
            control_sent=self._controller.bytes_sent,
            control_received=self._controller.bytes_received,
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
        self._forget(None)
        self._controller.end_calls()
        self._memory.close()
        await self._writes.ended()
        with contextlib.suppress(RLError):
            await self._controller.say_last(Bye(), flush_s)
        for name in list(self._watched):
            self._unwatch_process(name)
        self._controller.mute()
        self._leases.detach()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- writing, inner
    async def _commit_batch(
        self, wish: Commit, data: BatchData, deadline: float, ended: Iterable[int] = ()
    ) -> tuple[int, ...]:
        spec = plan(data)
        header = msgspec.msgpack.encode(spec)

        async def write(span: Span) -> tuple[int, ...]:
            with self._writes:
                await self._memory.write(span, spec, data, self._left(deadline))
            return await self._commit(wish, (span, header, data.nbytes), deadline)

        return await self._with_room(spec.payload, deadline, write, ended)

    async def _commit_draft(self, wish: Commit, draft: Draft, deadline: float) -> tuple[int, ...]:
        if not isinstance(draft, _ArenaDraft):
            raise BatchError("A draft can only be put into the plane that made it.")
        batch = draft.batch()
        nbytes = batch.nbytes
        try:
            with self._writes:
                await self._memory.finish(draft.span, draft.header, batch, self._left(deadline))
            uids = await self._commit(wish, (draft.span, msgspec.msgpack.encode(draft.header), nbytes), deadline)
        except PlaneLostError:
            draft.discard()
            self._controller.check()
            return await self._commit_batch(wish, batch, deadline, ended=(draft.span.unit,))
        except BaseException:
            draft.discard()
            raise
        draft.close()
        return uids

    async def _commit(self, wish: Commit, block: tuple[Span, bytes, int] | None, deadline: float) -> tuple[int, ...]:
        nbytes = 0
        if block is not None:
            span, header, nbytes = block
            spare = self._regions.wish(span.nbytes)
            wish = msgspec.structs.replace(wish, block=span, header=header, spare=spare)
        call = self._controller.start(wish)
        try:
            made = await self._controller.finish(call, Committed, self._left(deadline), takes=wish.spare > 0)
        except BaseException:
            if wish.spare:
                self._regions.add(None)
            raise
        if wish.spare:
            self._reserve_spare(made)
        self._written += nbytes
        return _numbers(made.uids)

    def _reserve_spare(self, made: Committed) -> None:
        rest = self._regions.add(made.spare)
        if rest is not None:
            self._abandon(rest)

    async def _with_room(
        self, nbytes: int, deadline: float, use: Callable[[Span], Awaitable[T]], ended: Iterable[int] = ()
    ) -> T:
        """Use memory for one put; when its unit ends meanwhile, again with memory of another. What was not used is given back."""
        gone = set(ended)
        while True:
            span = await self._room(nbytes, deadline, gone)
            try:
                return await use(span)
            except PlaneLostError:
                self._abandon(span)
                self._give_up_reserve()
                self._controller.check()
                gone.add(span.unit)
                if len(gone) == len(self._descriptor.units):
                    raise
            except BaseException:
                self._abandon(span)
                raise

    async def _room(self, nbytes: int, deadline: float, gone: Set[int]) -> Span:
        """Memory for one put, of the reserve or of whichever unit has some first, but not of the units `gone`."""
        while True:
            span = self._regions.carve(nbytes) or await self._reserve(nbytes, deadline)
            if span.unit not in gone:
                return span
            self._abandon(span)
            self._give_up_reserve()
            if not self._left(deadline):
                raise PlaneTimeout(
                    f"Storage unit {span.unit} of the data plane can't be reached, and no other had room."
                )
            await asyncio.sleep(_NOTICE_S)

    async def _reserve(self, nbytes: int, deadline: float) -> Span:
        left = self._left(deadline)
        wish = Reserve(nbytes, left)
        return (await self._controller.call(wish, Reserved, left + _GRACE_S, takes=True)).span

    def _give_up_reserve(self) -> None:
        rest = self._regions.take()
        if rest is not None:
            self._abandon(rest)

    def _abandon(self, span: Span) -> None:
        if not self._closed:
            late = self._memory.abandon(span)
            with contextlib.suppress(PlaneLostError):
                self._controller.tell(Abandon((span,), late))

    # -- reading, inner
    async def _locate(self, question: Question, seconds: float) -> Location:
        partition, keys, names, generations = question
        lease, anchor = self._leases.new()
        wish = Locate(lease, partition, keys, names, np.array(generations, "<i8").tobytes())
        place = Location(await self._controller.call(wish, Located, seconds), anchor)
        if names and self._locations is not None:
            self._locations.keep(question, place)
        return place

    def _forget(self, partition: str | None) -> None:
        """Locations are not needed any more, nor are the leases that only they held."""
        if self._locations is not None:
            if partition is None:
                self._locations.clear()
            else:
                self._locations.forget_partition(partition)
        self._leases.flush()

    # -- inner
    def _seconds(self, timeout_s: float | None) -> float:
        return min(max(0.0, self._descriptor.timeout_s if timeout_s is None else timeout_s), 1e9)

    def _left(self, deadline: float) -> float:
        return max(0.0, deadline - self._loop.time())

    def _notice(self, notice: Answer) -> None:
        if isinstance(notice, Revoked):
            if self._locations is not None:
                self._locations.forget_blocks(notice.blocks)
            self._leases.flush()
        elif isinstance(notice, Reclaim):
            self._give_up_reserve()

    def _watch_process(self, name: str, pidfd: int, unit: int | None = None) -> None:
        self._watched[name] = pidfd
        self._loop.add_reader(pidfd, self._ended, name, unit)

    def _unwatch_process(self, name: str) -> None:
        pidfd = self._watched.pop(name)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)

    def _ended(self, name: str, unit: int | None) -> None:
        """The plane is lost with its controller, or with the last of its units."""
        self._unwatch_process(name)
        if unit is not None:
            self._regions.lose(unit)
        if "controller" not in self._watched or len(self._watched) == 1:
            self._controller.lose(f"The {name} of the data plane has ended{self._route.or_else}; the data is lost.")
            self._memory.close()


def _meta(partition: str, rows: Rows) -> KVBatchMeta:
    tags = TagRows(len(rows.keys), partial(to_rows, rows.tags, len(rows.keys)))
    return KVBatchMeta.listed(partition, rows.keys, tags, rows.fields, _numbers(rows.uids))


def _numbers(packed: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(packed, "<i8").tolist())


def _check_put(
    keys: Sequence[str],
    data: BatchData | Draft | None,
    tags: Sequence[Tag] | None,
    expect: Sequence[Tag | None] | None,
) -> None:
    if len(keys) > 1 and len(set(keys)) != len(keys):
        seen: set[str] = set()
        twice = next(key for key in keys if key in seen or seen.add(key))
        raise DuplicateKeyError(f"Key {twice!r} occurs more than once in one put; keys must be unique.")
    for what, given in (("rows of data", data), ("tags", tags), ("expected tags", expect)):
        if given is not None and len(given) != len(keys):
            raise BatchError(f"A put needs one row per key: {len(keys)} keys, {len(given)} {what}.")
