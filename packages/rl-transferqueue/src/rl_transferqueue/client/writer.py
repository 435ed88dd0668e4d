"""The put path of a client: get memory of a storage unit, write to it, and commit."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from typing import TypeVar

import msgspec

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import AnyArray
from rl_protocol.batch.schema import ColumnSpec
from rl_protocol.errors import BatchError, PlaneLostError, PlaneTimeout
from rl_protocol.wire import plan
from rl_protocol.wire.draft import Draft, plan_columns
from rl_transferqueue.client.deadline import SERVER_GRACE_S, seconds_until
from rl_transferqueue.client.memory_interface import UNIT_LOSS_POLL_S, PlaneMemory
from rl_transferqueue.client.reservation import Reservation
from rl_transferqueue.client.retries.controller_replaced import ControllerReplaced
from rl_transferqueue.client.retries.put_timeout import PutTimeout
from rl_transferqueue.transport.control_client import ControlClient
from rl_transferqueue.wire.arrays import unpack_tuple
from rl_transferqueue.wire.messages import Abandon, Commit, Committed, Recall, Recalled, Reserve, Reserved
from rl_transferqueue.wire.spans import Span

T = TypeVar("T")


class _ArenaDraft(Draft):
    """A draft in the memory of a unit, which is given back once the draft and all arrays made from
    it are freed.
    """

    owner: Writer
    span: Span
    era: int
    """`ControlClient.era` when the span was reserved."""
    on_freed: weakref.finalize[[asyncio.AbstractEventLoop, Span, int], AnyArray]

    def close(self) -> None:
        self.on_freed.detach()
        super().close()

    def discard(self) -> None:
        self.on_freed.detach()
        super().discard()


class _WritesInFlight:
    """Counts writes to reserved memory; each is a `with` block."""

    def __init__(self) -> None:
        self._count = 0
        self._none: asyncio.Event | None = None
        """Set when the last write ends; made by the first who waits."""

    def __enter__(self) -> None:
        self._count += 1

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count and self._none is not None:
            self._none.set()

    async def wait_none(self) -> None:
        """Wait until no write is in flight; none may start any more."""
        if self._count:
            self._none = self._none or asyncio.Event()
            await self._none.wait()


class Writer:
    """Writes columns for one client, and keeps the memory it reserved."""

    def __init__(
        self, controller: ControlClient, memory: PlaneMemory, reservation: Reservation, units: int, session: bytes
    ) -> None:
        self._controller = controller
        self._session = session
        self._memory = memory
        self._reservation = reservation
        self._units = units
        self._writes = _WritesInFlight()
        self._closed = False
        self.bytes_written = 0

    async def put(
        self, request: Commit, data: BatchData | Draft | None, deadline: float, again: PutTimeout | None = None
    ) -> tuple[int, ...]:
        """Store `data` with a commit that has no block yet, unless an earlier try was made.

        Args:
            request: the commit.
            data: its columns.
            deadline: of the whole put.
            again: the error of the earlier try.

        Returns:
            The generations of the rows.

        Raises:
            BatchError: the draft belongs to another client, the batch fits no unit, or the earlier
                try was another client's.
            ConflictError, CapacityTimeout: the controller's answer.
            PlaneTimeout, PlaneLostError: the deadline passed; the plane has ended.
        """
        if again is not None:
            made = await self._recall(again, deadline)
            if made is not None:
                if isinstance(data, Draft):
                    data.discard()
                return unpack_tuple(made, len(request.keys))
        if isinstance(data, Draft):
            return await self._commit_draft(request, data, deadline)
        if data is None or not data.field_names:
            return await self._commit(request, None, deadline)
        return await self._commit_batch(request, data, deadline)

    async def alloc(
        self, columns: Iterable[ColumnSpec], rows: int, lengths: Mapping[str, Sequence[int]], deadline: float
    ) -> Draft:
        """A draft in the memory of a unit; see DataPlane.alloc."""
        header, offsets = plan_columns(columns, rows, lengths)
        loop = asyncio.get_running_loop()

        async def make(span: Span, era: int) -> Draft:
            memory = self._memory.draft(span, header.payload)
            on_freed = weakref.finalize(memory, self._draft_freed, loop, span, era)
            on_freed.atexit = False
            draft = _ArenaDraft(header, offsets, memory, lambda: self._give_back(span, era))
            draft.owner, draft.span, draft.era, draft.on_freed = self, span, era, on_freed
            return draft

        return await self._with_room(header.payload, deadline, make)

    def use_memory(self, memory: PlaneMemory) -> None:
        """Write to this memory from here on."""
        self._memory = memory

    def drop_reserve(self) -> None:
        """The controller has ended, and with it what it has reserved."""
        self._reservation.drop()

    def lose_unit(self, unit: int) -> None:
        """Drop reserved memory of a unit that has ended."""
        self._reservation.lose(unit)

    def give_back_reserve(self) -> None:
        """Give reserved memory back to the controller."""
        rest = self._reservation.take()
        if rest is not None:
            self._give_back(rest, self._controller.era)

    async def close(self) -> None:
        """Wait for writes in flight. Memory is not given back from here on: the session ends."""
        self._closed = True
        await self._writes.wait_none()

    async def _commit_batch(
        self, request: Commit, data: BatchData, deadline: float, ended: Iterable[int] = ()
    ) -> tuple[int, ...]:
        spec = plan(data)
        header = msgspec.msgpack.encode(spec)

        async def write(span: Span, era: int) -> tuple[int, ...]:
            with self._writes:
                await self._memory.write(span, spec, data, seconds_until(deadline))
            return await self._commit(request, (span, header, data.nbytes), deadline, era)

        return await self._with_room(spec.payload, deadline, write, ended)

    async def _commit_draft(self, request: Commit, draft: Draft, deadline: float) -> tuple[int, ...]:
        if not isinstance(draft, _ArenaDraft) or draft.owner is not self:
            raise BatchError("A draft can only be put by the client whose alloc made it; alloc one with this client.")
        batch = draft.batch()
        nbytes = batch.nbytes
        try:
            self._check_era(draft.era)
            with self._writes:
                await self._memory.finish(draft.span, draft.header, batch, seconds_until(deadline))
            block = (draft.span, msgspec.msgpack.encode(draft.header), nbytes)
            generations = await self._commit(request, block, deadline, draft.era)
        except PlaneLostError:
            draft.discard()
            self._controller.check()
            ended = (draft.span.unit,) if draft.era == self._controller.era else ()
            return await self._commit_batch(request, batch, deadline, ended=ended)
        except BaseException:
            draft.discard()
            raise
        draft.close()
        return generations

    async def _commit(
        self, request: Commit, block: tuple[Span, bytes, int] | None, deadline: float, era: int | None = None
    ) -> tuple[int, ...]:
        nbytes = 0
        if era is None:
            era = self._controller.era
        if block is not None:
            self._check_era(era)
            span, header, nbytes = block
            spare = self._reservation.request(span.nbytes)
            request = msgspec.structs.replace(request, block=span, header=header, spare=spare)
        try:
            done = await self._send(request, deadline)
        except BaseException:
            if request.spare:
                self._reservation.add(None)
            raise
        if request.spare:
            self._add_reserve(done.spare if era == self._controller.era else None)
        self.bytes_written += nbytes
        return unpack_tuple(done.generations, len(request.keys))

    async def _send(self, request: Commit, deadline: float) -> Committed:
        call = self._controller.start(request)
        try:
            return await self._controller.finish(call, Committed, seconds_until(deadline), takes=request.spare > 0)
        except PlaneTimeout as error:
            raise PutTimeout(error.message, session=self._session, request=call.id) from error

    def _check_era(self, era: int) -> None:
        """Raise ControllerReplaced if memory of that era is not to be used any more."""
        if era != self._controller.era:
            raise ControllerReplaced("The controller has ended during a put, which begins again.")

    async def _recall(self, late: PutTimeout, deadline: float) -> bytes | None:
        """The packed generations of a put that was not answered in time; None: it was not made."""
        if late.session != self._session:
            raise BatchError(
                "Only the client whose put timed out can repeat it (`again`); got the error of another one."
            )
        try:
            found = await self._controller.call(Recall(late.request), Recalled, seconds_until(deadline))
        except PlaneTimeout as error:
            raise PutTimeout(error.message, session=late.session, request=late.request) from error
        return found.generations if found.made else None

    def _add_reserve(self, spare: Span | None) -> None:
        rest = self._reservation.add(spare)
        if rest is not None:
            self._give_back(rest, self._controller.era)

    async def _with_room(
        self, nbytes: int, deadline: float, use: Callable[[Span, int], Awaitable[T]], ended: Iterable[int] = ()
    ) -> T:
        """Call `use` with memory for one put and its era, and again with another unit's if its unit
        ends, or from the successor if the controller ends.

        Memory that was not used is given back.
        """
        lost = set(ended)
        while True:
            era = self._controller.era
            try:
                span = await self._room(nbytes, deadline, lost)
            except ControllerReplaced:
                continue
            if era != self._controller.era:
                continue
            try:
                return await use(span, era)
            except PlaneLostError:
                self._give_back(span, era)
                self.give_back_reserve()
                self._controller.check()
                if era != self._controller.era:
                    continue
                lost.add(span.unit)
                if len(lost) == self._units:
                    raise
            except BaseException:
                self._give_back(span, era)
                raise

    async def _room(self, nbytes: int, deadline: float, lost: Set[int]) -> Span:
        """Memory for one put, from the reserve or the controller, outside of the units `lost`."""
        while True:
            era = self._controller.era
            span = self._reservation.carve(nbytes) or await self._reserve(nbytes, deadline)
            if span.unit not in lost:
                return span
            self._give_back(span, era)
            self.give_back_reserve()
            if not seconds_until(deadline):
                raise PlaneTimeout(
                    f"Storage unit {span.unit} of the data plane can't be reached, and no other unit had room."
                )
            await asyncio.sleep(UNIT_LOSS_POLL_S)

    async def _reserve(self, nbytes: int, deadline: float) -> Span:
        left = seconds_until(deadline)
        request = Reserve(nbytes, left)
        return (await self._controller.call(request, Reserved, left + SERVER_GRACE_S, takes=True)).span

    def _draft_freed(self, loop: asyncio.AbstractEventLoop, span: Span, era: int) -> None:
        """Runs in a finalizer in any thread, so it must not block or raise."""
        with contextlib.suppress(RuntimeError):  # the loop is closed; the memory ends with the session
            loop.call_soon_threadsafe(self._give_back, span, era)

    def _give_back(self, span: Span, era: int) -> None:
        if not self._closed and era == self._controller.era:
            late = self._memory.abandon(span)
            with contextlib.suppress(PlaneLostError):
                self._controller.tell(Abandon((span,), late))
