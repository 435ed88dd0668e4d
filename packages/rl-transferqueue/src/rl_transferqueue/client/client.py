"""Client and connect: one session with a plane."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Self, cast

import msgspec
import numpy as np

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.kv_batch_meta import KVBatchMeta, LazyRows, Scalar, Tag, check_where
from rl_protocol.batch.schema import ColumnSpec
from rl_protocol.counted import counted
from rl_protocol.errors import BatchError, ConfigError, DuplicateKeyError, PlaneLostError, PlaneTimeout, RLError
from rl_protocol.ports import DataPlane, PlaneStats, RowChanges, RowFlags, RowHosts, Traffic
from rl_protocol.support.host_identity import this_host
from rl_protocol.wire.draft import Draft
from rl_transferqueue.backends import BUILT_IN
from rl_transferqueue.client.choose_memory import Route, route
from rl_transferqueue.client.copied_columns import CopiedColumns
from rl_transferqueue.client.deadline import SERVER_GRACE_S, deadline_after, seconds_until
from rl_transferqueue.client.leases import Leases
from rl_transferqueue.client.location_cache import LocationCache
from rl_transferqueue.client.reader import Reader
from rl_transferqueue.client.reservation import Reservation
from rl_transferqueue.client.retries.controller_replaced import ControllerReplaced
from rl_transferqueue.client.retries.put_timeout import PutTimeout
from rl_transferqueue.client.server_watch import CONTROLLER, ServerWatch
from rl_transferqueue.client.writer import Writer
from rl_transferqueue.memory.block_epochs import EpochView
from rl_transferqueue.transport.control_client import Call, ControlClient
from rl_transferqueue.wire.arrays import unpack_tuple
from rl_transferqueue.wire.descriptor import PlaneDescriptor, UnitAddress
from rl_transferqueue.wire.messages import (
    Answer,
    Bye,
    Changes,
    Claim,
    Clear,
    Cleared,
    Commit,
    Committed,
    Done,
    FindHosts,
    Flags,
    GetConsumption,
    GetMetrics,
    GetProduction,
    GetStats,
    Hello,
    HostBytes,
    JoinUnits,
    ListRows,
    Locate,
    Metrics,
    Reclaim,
    Reserve,
    ResetConsumption,
    Resume,
    Resumed,
    Revoked,
    Rows,
    Stats,
    Unload,
    WaitReady,
    Watch,
)
from rl_transferqueue.wire.process_liveness import this_process
from rl_transferqueue.wire.spans import most_spare
from rl_transferqueue.wire.tags import to_columns, to_rows

_NO_LIMIT_S = 1e9
_OTHER_PROCESS_S = 3.0
"""Seconds to ask for the controller at an address whose process is another one than expected."""
_JOIN_S = 60.0
"""Seconds that the controller has to connect to the units of another host."""


async def connect(descriptor: PlaneDescriptor, *, timeout_s: float = 10.0) -> Client:
    """Connect this process to a plane; the client belongs to the running loop.

    Raises:
        PlaneLostError: the controller does not run, or no storage unit does.
        PlaneTimeout: the controller did not answer within `timeout_s` seconds.
    """
    deadline = deadline_after(timeout_s)
    while True:
        try:
            return await _connect(descriptor, seconds_until(deadline))
        except (PlaneLostError, ConfigError) as error:
            if not descriptor.successor_s:
                raise
            descriptor = await _find_later(descriptor, deadline, error)


async def _find_later(
    descriptor: PlaneDescriptor, deadline: float, error: PlaneLostError | ConfigError
) -> PlaneDescriptor:
    """The successor of a controller that can't be connected to.

    On another host this may be the error of a wrong key, or of a descriptor with an earlier
    controller of the same address, which only the controller can tell apart.
    """
    plane = route(descriptor, b"")
    if isinstance(error, PlaneLostError):
        return await plane.find_successor(deadline)
    if plane.here:
        raise error
    try:
        return await plane.find_successor(min(deadline, deadline_after(_OTHER_PROCESS_S)))
    except PlaneLostError:
        raise error from None


async def _connect(descriptor: PlaneDescriptor, timeout_s: float) -> Client:
    client = Client(descriptor)
    try:
        await client.open(timeout_s)
    except BaseException:
        await client.close(flush_s=0.0)
        raise
    return client


class Client(DataPlane):
    """One session with a plane, made by `connect`.

    Lifecycle: connected until `close`, or until the controller or the last storage unit ends. Then
    every call, also those under way, raises PlaneLostError. If one of several units ends, only
    reads of rows in it fail, with DataLostError. Where the controller can have a successor
    (`start_local_plane(successor_s=)`), calls wait for it instead. In a forked process every call
    raises PlaneLostError: connect again there. So it does in another event loop.

    `get` returns views of shared memory if its rows lie side by side in one block. Views never
    change, and they keep their block from being reused: while memory is scarce, hold them briefly,
    or copy them. Other rows are copied, once for gets of the same rows that follow each other
    (`TransferQueueConfig.read_cache_mb`).
    """

    def __init__(self, descriptor: PlaneDescriptor) -> None:
        self._descriptor = descriptor
        loop = asyncio.get_running_loop()
        session = self._session = b"\x01" + os.urandom(7)
        self._route = route(descriptor, session)
        self._memory = self._route.memory(lambda nbytes: self._controller.moved(nbytes), self._await_successor)
        self._controller = ControlClient(
            loop, self._route.connect(), CONTROLLER, on_notice=self._notice, on_closed=self._await_successor
        )
        self._search: asyncio.Task[None] | None = None
        """For the successor of the controller."""
        self._leases = Leases(loop, self._controller)
        self._servers = ServerWatch(loop, self._server_ended)
        ours = descriptor.backend in BUILT_IN  # other backends store each block by itself, and keep what is read
        reservation = Reservation(most_spare(descriptor.units[0].arena_bytes) if ours else 0)
        self._writer = Writer(self._controller, self._memory, reservation, len(descriptor.units), session)
        copies = CopiedColumns(descriptor.read_cache_mb << 20 if ours else 0, views=self._memory.views)
        self._reader = Reader(self._controller, self._memory, self._leases, copies)
        self._closed = False

    async def open(self, timeout_s: float) -> None:
        """Part of `connect`."""
        deadline = deadline_after(timeout_s)
        controller, units = self._descriptor.controller, self._descriptor.units
        self._servers.add(CONTROLLER, await self._route.lifeline(controller, CONTROLLER, timeout_s))
        if self._route.here:
            self._reader.use_cache(LocationCache(EpochView(controller)))
        hello = Hello(this_process() if self._route.maps_memory else None, this_host())
        await self._controller.call(hello, Done, seconds_until(deadline))
        for i, unit in enumerate(units):
            name = f"storage unit {i}"
            try:
                # a unit whose host is lost does not answer, and must leave time for the others
                self._servers.add(name, await self._route.lifeline(unit, name, seconds_until(deadline) / 2), i)
            except (PlaneLostError, PlaneTimeout):
                self._writer.lose_unit(i)
                if i == len(units) - 1 and not self._servers.any_unit_runs:
                    raise

    async def put(
        self,
        partition: str,
        keys: Sequence[str],
        data: BatchData | Draft | None = None,
        *,
        tags: Sequence[Tag] | None = None,
        expect: Sequence[Tag | None] | None = None,
        timeout_s: float | None = None,
        again: PutTimeout | None = None,
    ) -> KVBatchMeta:
        """Store columns and tags of rows; see `rl_protocol.ports.DataPlane.put`.

        Args:
            partition: see there, as for the arguments that follow.
            keys: see there.
            data: see there.
            tags: see there.
            expect: see there.
            timeout_s: see there.
            again: the error of an earlier try of this put. If that one was made after all, it
                counts, and nothing is stored: so a put with `expect` does not conflict with itself.

        Raises:
            PutTimeout: the put was not answered in time; repeat it with `again`. The other errors
                are those of the port.
        """
        deadline = deadline_after(self._seconds(timeout_s))
        keys = _names("keys", keys)
        _check_put(keys, data, tags, expect)
        fields = data.field_names if data is not None else ()
        generations: tuple[int, ...] = ()
        if keys:
            request = Commit(
                partition,
                keys,
                to_columns(keys, tags) if tags is not None else (),
                tuple(tags if tags is None else check_where(tags) for tags in expect) if expect is not None else None,
            )
            generations = await self._writer.put(request, data, deadline, again)
        return KVBatchMeta.unchecked(partition, keys, tuple(map(dict, tags or ())), fields, generations)

    async def alloc(
        self,
        columns: Iterable[ColumnSpec],
        rows: int,
        lengths: Mapping[str, Sequence[int]] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Draft:
        return await self._writer.alloc(columns, rows, lengths or {}, deadline_after(self._seconds(timeout_s)))

    async def clear(self, partition: str, keys: Sequence[str] | None = None, *, timeout_s: float | None = None) -> int:
        self._reader.forget(partition)
        request = Clear(partition, None if keys is None else _names("keys", keys))
        return (await self._controller.call(request, Cleared, self._seconds(timeout_s))).count

    async def unload(self, partition: str, keys: Sequence[str], *, timeout_s: float | None = None) -> None:
        names = _names("keys", keys)
        self._reader.forget(partition)
        await self._controller.call(Unload(partition, names), Done, self._seconds(timeout_s))

    async def get(
        self, meta: KVBatchMeta, fields: Sequence[str] | None = None, *, timeout_s: float | None = None
    ) -> BatchData:
        names = tuple(dict.fromkeys(meta.fields if fields is None else _names("fields", fields)))
        if not meta.keys:
            return BatchData({}, 0)
        query = (meta.partition, meta.keys, names, meta.generations)
        return await self._reader.get(query, deadline_after(self._seconds(timeout_s)))

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
        named = None if keys is None else _names("keys", keys)
        request = ListRows(partition, check_where(where or {}), _names("fields", fields), task, named)
        return _meta(partition, await self._controller.call(request, Rows, self._seconds(timeout_s)))

    async def watch(
        self, partition: str, *, since: int = 0, where: Mapping[str, Scalar] | None = None, timeout_s: float
    ) -> RowChanges:
        if since < 0:
            raise BatchError(f"watch needs since >= 0; got {since}.")

        seconds = self._seconds(timeout_s)
        request = Watch(partition, since, check_where(where or {}), seconds)
        found = await self._controller.call(request, Changes, seconds + SERVER_GRACE_S)
        return RowChanges(
            rows=_meta(partition, found.rows), removed=found.removed, version=found.version, reset=found.reset
        )

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
        if count < 0:
            raise BatchError(f"wait_ready needs count >= 0; got {count}.")

        seconds = self._seconds(timeout_s)
        request = WaitReady(partition, count, _names("fields", fields), check_where(where or {}), task, seconds)
        rows = await self._controller.call(request, Rows, seconds + SERVER_GRACE_S, takes=task is not None)
        return _meta(partition, rows)

    async def claim(
        self, partition: str, keys: Sequence[str], *, task: str, timeout_s: float | None = None
    ) -> KVBatchMeta:
        request = Claim(partition, _names("keys", keys), task)
        return _meta(partition, await self._controller.call(request, Rows, self._seconds(timeout_s), takes=True))

    async def consumption_status(self, partition: str, *, task: str, timeout_s: float | None = None) -> RowFlags:
        found = await self._controller.call(GetConsumption(partition, task), Flags, self._seconds(timeout_s))
        return RowFlags(keys=found.keys, flags=np.frombuffer(found.flags, np.bool_))

    async def production_status(
        self, partition: str, *, fields: Sequence[str], timeout_s: float | None = None
    ) -> RowFlags:
        request = GetProduction(partition, _names("fields", fields))
        found = await self._controller.call(request, Flags, self._seconds(timeout_s))
        flags = np.frombuffer(found.flags, np.bool_).reshape(len(found.keys), len(fields))
        return RowFlags(keys=found.keys, flags=flags)

    async def row_hosts(self, partition: str, keys: Sequence[str], *, timeout_s: float | None = None) -> RowHosts:
        request = FindHosts(partition, _names("keys", keys))
        found = await self._controller.call(request, HostBytes, self._seconds(timeout_s))
        nbytes = np.frombuffer(found.nbytes, "<i8").reshape(len(request.keys), len(found.hosts))
        return RowHosts(hosts=found.hosts, nbytes=nbytes)

    async def reset_consumption(
        self,
        partition: str,
        *,
        task: str | None = None,
        keys: Sequence[str] | None = None,
        timeout_s: float | None = None,
    ) -> int:
        request = ResetConsumption(partition, task, None if keys is None else _names("keys", keys))
        return (await self._controller.call(request, Cleared, self._seconds(timeout_s))).count

    async def stats(self, *, timeout_s: float | None = None) -> PlaneStats:
        self._reader.forget()  # cached locations hold blocks; those of readers still count as used
        stats = await self._controller.call(GetStats(), Stats, self._seconds(timeout_s))
        return PlaneStats(
            rows=stats.rows,
            bytes_used=stats.bytes_used,
            bytes_reserved=stats.bytes_reserved,
            bytes_capacity=stats.bytes_capacity,
            lost=stats.lost,
            columns=stats.columns,
            tasks=stats.tasks,
            links=msgspec.structs.asdict(stats.links),
            damaged=stats.damaged,
            evicted=stats.evicted,
        )

    async def metrics(self, *, timeout_s: float | None = None) -> Metrics:
        """The controller's totals for all clients: requests, seconds, errors, bytes by column."""
        return await self._controller.call(GetMetrics(), Metrics, self._seconds(timeout_s))

    async def join_units(self, units: Sequence[UnitAddress]) -> None:
        """Part of `LocalPlane.join`."""
        await self._controller.call(JoinUnits(tuple(units)), Done, _JOIN_S)

    def traffic(self) -> Traffic:
        return Traffic(
            control_sent=self._controller.bytes_sent,
            control_received=self._controller.bytes_received,
            data_written=self._writer.bytes_written,
            data_read=self._reader.bytes_read,
        )

    async def close(self, *, flush_s: float = 1.0) -> None:
        """Close the session; safe to call twice. Views stay valid and keep their blocks.

        Args:
            flush_s: seconds that the controller has to acknowledge the end.

        Raises:
            PlaneLostError: in a forked process; the session is the parent's. In another event loop.
        """
        self._controller.check_process()
        if self._closed:
            return
        self._controller.check_loop()
        self._closed = True
        if self._search is not None:
            self._search.cancel()
        self._reader.forget()
        self._controller.end_calls()
        self._memory.close()
        await self._writer.close()
        with contextlib.suppress(RLError):
            await self._controller.say_last(Bye(), flush_s)
        self._servers.close()
        self._controller.mute()
        self._leases.detach()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _seconds(self, timeout_s: float | None) -> float:
        seconds = self._descriptor.timeout_s if timeout_s is None else timeout_s
        return seconds if 0.0 <= seconds <= _NO_LIMIT_S else min(max(0.0, seconds), _NO_LIMIT_S)

    def _notice(self, notice: Answer) -> None:
        """Handle a message that the controller sends unasked."""
        if isinstance(notice, Revoked):
            self._reader.forget_blocks(notice.blocks)
        elif isinstance(notice, Reclaim):
            self._writer.give_back_reserve()

    def _server_ended(self, name: str, unit: int | None) -> None:
        """The plane is lost with its controller, or with the last of its units."""
        if unit is not None:
            self._writer.lose_unit(unit)
        elif self._await_successor():
            self._controller.end_resume(f"The {name} of the data plane has ended, too.")
            return
        if not (self._servers.any_unit_runs if self._search is not None else self._servers.plane_runs):
            self._controller.lose(f"The {name} of the data plane has ended{self._route.or_else}; the data is lost.")
            self._memory.close()
            if self._search is not None:
                self._search.cancel()

    # -- the successor of a controller
    def _await_successor(self) -> bool:
        """The controller has ended: let calls wait for its successor; False: there can be none."""
        if not self._descriptor.successor_s or self._closed:
            return False
        if self._search is None:
            self._controller.suspend(lambda call: _replaced() if isinstance(call.body, Reserve | Locate) else None)
            self._writer.drop_reserve()
            self._reader.forget()
            self._search = asyncio.get_running_loop().create_task(self._join_successor())
        return True

    async def _join_successor(self) -> None:
        deadline = deadline_after(self._descriptor.successor_s)
        plane = self._route
        try:
            while True:
                found = await plane.find_successor(deadline, lambda: self._servers.runs(CONTROLLER))
                plane = route(found, self._session)
                try:
                    await self._resume(plane, deadline)
                    break
                except (PlaneLostError, PlaneTimeout):  # it has ended, too
                    continue
                except ConfigError:
                    if plane.here:
                        raise
                    continue  # another process is at its address
        except RLError as error:
            self._controller.lose(error.message)
            self._memory.close()
        finally:
            self._search = None

    async def _resume(self, plane: Route, deadline: float) -> None:
        """Continue the session at a successor."""
        found = plane.descriptor.controller
        lifeline = await plane.lifeline(found, CONTROLLER, seconds_until(deadline))
        self._servers.forget(CONTROLLER)
        self._servers.add(CONTROLLER, lifeline)
        try:
            cache = LocationCache(EpochView(found)) if plane.here else None

            def resume(unanswered: tuple[int, ...]) -> Resume:
                process = this_process() if plane.maps_memory else None
                return Resume(found.incarnation, process, this_host(), unanswered)

            answer = await self._controller.resume(plane.connect(), resume, Resumed, seconds_until(deadline))
        except BaseException:
            self._servers.forget(CONTROLLER)
            raise
        self._memory.close()
        self._descriptor, self._route = plane.descriptor, plane
        self._memory = plane.memory(self._controller.moved, self._await_successor)
        self._writer.use_memory(self._memory)
        self._reader.use_memory(self._memory)
        if cache is not None:
            self._reader.use_cache(cache)
        made = dict(answer.made)

        def outcome(call: Call) -> Answer | RLError | None:
            if call.id in made:
                return Committed(made[call.id])
            if isinstance(call.body, Hello):
                return Done()
            return _replaced() if isinstance(call.body, Commit) and call.body.block is not None else None

        self._controller.continue_calls(outcome)


def _replaced() -> ControllerReplaced:
    return ControllerReplaced("The controller of the data plane has ended.")


def _meta(partition: str, rows: Rows) -> KVBatchMeta:
    size = len(rows.keys)
    tags = LazyRows(size, partial(to_rows, rows.tags, size))
    generations = LazyRows(size, partial(unpack_tuple, rows.generations, size))
    return KVBatchMeta.unchecked(partition, rows.keys, tags, rows.fields, generations)


def _names(what: str, names: Sequence[str]) -> tuple[str, ...]:
    """The names; a string would be a sequence of its characters."""
    if isinstance(names, str):
        raise BatchError(f"{what} must be a sequence of strings; got one string, {names!r}: put it in a list.")
    listed = tuple(names)
    for kind in set(map(type, listed)):  # a check of each name would take as long as the rest of a put
        if not issubclass(kind, str):
            other = next(name for name in listed if type(name) is kind)
            raise BatchError(f"{what} must be a sequence of strings; got {other!r} in it.")
    return listed


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
    rows = len(keys)
    if not isinstance(cast(object, data), BatchData | Draft | None):
        raise BatchError(f"The data of a put must be a BatchData or a Draft; got {type(data).__name__}.")
    if isinstance(tags, Mapping):
        raise BatchError("tags must be a list of mappings, one per key; got one mapping.")
    if data is not None and len(data) != rows:
        raise BatchError(f"A put needs one row per key: {counted(rows, 'key')}, {counted(len(data), 'row')} of data.")
    if tags is not None and len(tags) != rows:
        raise BatchError(f"A put needs one row per key: {counted(rows, 'key')}, {counted(len(tags), 'tag')}.")
    if expect is not None and len(expect) != rows:
        raise BatchError(
            f"A put needs one row per key: {counted(rows, 'key')}, {counted(len(expect), 'expected tag')}."
        )
