"""The client's side of the control protocol: many concurrent calls over one link."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Collection
from itertools import count
from typing import NamedTuple, TypeVar

import msgspec

from rl_protocol.errors import UNREADABLE, BatchError, PlaneLostError, PlaneTimeout, RLError, WireError
from rl_transferqueue.transport.unix_link import LOOK_S, Link, LinkClosed
from rl_transferqueue.wire.failures import error_of
from rl_transferqueue.wire.messages import (
    NOTICE,
    Answer,
    AnyRequest,
    Cancel,
    Done,
    Failure,
    LinkBytes,
    Reply,
    Request,
    pack,
)

A = TypeVar("A", bound=msgspec.Struct)
_decoder = msgspec.msgpack.Decoder(Reply)
_LINGER_S = 0.5
_UNANSWERED = 1024
"""Requests without answers that a successor hears of."""
_TURN_S = 1e-3
"""How long answers that come at once may keep the loop from others."""
CLOSED = "This client is closed; connect again."
FORKED = "A client of the data plane does not survive a fork; connect again in this process."
OTHER_LOOP = (
    "A client of the data plane belongs to the event loop that ran when it connected; connect in this loop, or use "
    "connect_blocking."
)


class Call(NamedTuple):
    """A request that was sent."""

    id: int
    answer: asyncio.Future[Answer | None]
    """The answer; None: the deadline has passed."""
    body: AnyRequest


def _expire(answer: asyncio.Future[Answer | None]) -> None:
    if not answer.done():
        answer.set_result(None)


class ControlClient:
    """Requests and answers of one session with one server.

    A call that is cancelled or times out sends `Cancel`: the server gives back what the call took.
    A late answer is dropped. In a forked process all calls fail: the link belongs to the parent.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        link: Link,
        name: str,
        on_notice: Callable[[Answer], None] | None = None,
        on_closed: Callable[[], bool] = lambda: False,
    ) -> None:
        """`on_closed` is called when the server has closed the connection; if it returns False, the
        client is lost.
        """
        self.name = name
        self.era = 0
        """Grows when the server ends: memory that it gave before is not to be used any more."""
        self._on_closed = on_closed
        self._suspended = False
        self._unanswered: deque[int] = deque(maxlen=_UNANSWERED)
        """Requests that were left without their answers."""
        self._on_notice = on_notice
        self.bytes_sent = 0
        self.bytes_received = 0
        self._loop = loop
        self._listening = True
        self._ids = count(1)
        self._pending: dict[int, Call] = {}
        self._received: list[int] = []
        """Calls that took something and have returned, which the server does not know yet."""
        self._ending = False
        self._lost: str | None = None
        self._turned = time.monotonic()
        """When a caller last yielded to the loop."""
        self._moved: LinkBytes | None = None
        self._process = os.getpid()
        self._link = link
        self._fd = link.fileno()
        self._connected = True
        """Whether the loop reads from the link."""
        self._resuming: Call | None = None
        loop.add_reader(self._fd, self._read)

    def start(self, body: AnyRequest) -> Call:
        """Send a request whose answer is awaited with `finish`.

        Raises:
            BatchError: the message can't be encoded; nothing was sent.
            PlaneLostError: see `check`.
        """
        self.check()
        call = Call(self.tell(body), asyncio.Future(loop=self._loop), body)
        self._pending[call.id] = call
        return call

    async def finish(self, call: Call, expect: type[A], timeout_s: float, *, takes: bool = False) -> A:
        """The answer, if it comes within `timeout_s` seconds.

        Args:
            call: made by `start`.
            expect: type of the answer.
            timeout_s: deadline; if the server keeps it, too, the client waits a little longer.
            takes: the call takes rows or memory; the server gives them back unless this call
                returns.

        Raises:
            PlaneTimeout, PlaneLostError, and whatever the server answers.
        """
        timer: asyncio.TimerHandle | None = None
        try:
            if not self._look(call.answer):
                timer = self._loop.call_later(timeout_s, _expire, call.answer)
            elif time.monotonic() - self._turned > _TURN_S:
                await asyncio.sleep(0)
                self._turned = time.monotonic()
            answer = await call.answer
        except asyncio.CancelledError:
            self._leave(call)
            raise
        finally:
            self._pending.pop(call.id, None)
            if timer is not None:
                timer.cancel()
                self._turned = time.monotonic()
        if answer is None:
            self._leave(call)
            raise PlaneTimeout(f"The {self.name} of the data plane did not answer within {round(timeout_s, 3):g} s.")
        if isinstance(answer, Failure):
            if takes:  # it may have taken rows whose description was too long for an answer
                self._leave(call)
            raise error_of(answer)
        if not isinstance(answer, expect):
            raise WireError(f"The {self.name} answered {type(answer).__name__} where {expect.__name__} was expected.")
        if takes:
            self._received.append(call.id)
        return answer

    async def call(self, body: AnyRequest, expect: type[A], timeout_s: float, *, takes: bool = False) -> A:
        """`start` and `finish`."""
        return await self.finish(self.start(body), expect, timeout_s, takes=takes)

    def tell(self, body: AnyRequest) -> int:
        """Send a message without waiting for an answer; returns its id.

        Raises:
            BatchError, PlaneLostError: see `start`.
        """
        self.check_process()
        if self._lost is not None:
            raise PlaneLostError(self._lost)
        request = next(self._ids)
        if not self._suspended:
            self._send(request, body)
        return request

    def _send(self, request: int, body: AnyRequest) -> None:
        frame = pack(Request(request, body, tuple(self._received), self._moved))
        self._received.clear()
        self._moved = None
        self.bytes_sent += len(frame)
        if not self._link.send(frame) and self._connected:
            self._loop.add_writer(self._fd, self._flush)
        if self._connected and self._link.pending():
            self._loop.call_soon(self._read)

    def moved(self, nbytes: LinkBytes) -> None:
        """The client has moved so much: the next request says so, for the totals of all clients."""
        self._moved = nbytes if self._moved is None else self._moved + nbytes

    def check(self) -> None:
        """Raise PlaneLostError if the client is closed or of another process or event loop, or the
        plane gone.
        """
        self.check_process()
        self.check_loop()
        if self._ending:
            raise PlaneLostError(CLOSED)
        if self._lost is not None:
            raise PlaneLostError(self._lost)

    def check_process(self) -> None:
        """Raise PlaneLostError if this process is not the one that connected."""
        if os.getpid() != self._process:
            raise PlaneLostError(FORKED)

    def check_loop(self) -> None:
        """Raise PlaneLostError if the running event loop is not the one that connected."""
        if asyncio.get_running_loop() is not self._loop:
            raise PlaneLostError(OTHER_LOOP)

    def lose(self, message: str) -> None:
        """The server is gone: every call, now and later, raises PlaneLostError."""
        if self._lost is None:
            self._lost = message
            self._fail(message)

    def end_calls(self) -> None:
        """Close the client: current and later calls raise PlaneLostError."""
        self._ending = True
        for request, call in self._pending.items():
            if not call.answer.done():
                call.answer.set_exception(PlaneLostError(CLOSED))
                with contextlib.suppress(PlaneLostError):
                    self.tell(Cancel(request))

    async def say_last(self, body: AnyRequest, timeout_s: float) -> None:
        """Send the last message of the session, and wait so long for the server to take notice.

        Raises:
            PlaneTimeout, PlaneLostError: see `finish`.
        """
        call = Call(self.tell(body), self._loop.create_future(), body)
        if timeout_s > 0 and not self._suspended:
            self._pending[call.id] = call
            await self.finish(call, Done, timeout_s)

    def mute(self) -> None:
        """Leave the loop: only `tell` may be used afterwards, by one thread at a time; nothing is
        read."""
        if self._listening:
            self._listening = False
            self._disconnect()
            if not self._suspended:
                self._link.detach(_LINGER_S)
            self._fail(CLOSED)

    def close(self) -> None:
        """Close the socket; messages sent last have half a second to leave."""
        self.mute()
        self.lose(CLOSED)
        self._link.close()

    # -- a server with a successor
    def suspend(self, end: Callable[[Call], RLError | None]) -> None:
        """The server has ended and may have a successor: calls, also new ones, wait for it. Other
        messages are dropped.

        Args:
            end: the error for calls that can't wait, or None.
        """
        self._suspended = True
        self.era += 1
        self._disconnect()
        self._link.close()
        self._received.clear()
        self._unanswered.extend(call.id for call in self._pending.values() if not call.answer.done())
        self._end_some(self._pending.values(), end)

    async def resume(
        self, link: Link, request: Callable[[tuple[int, ...]], AnyRequest], expect: type[A], timeout_s: float
    ) -> A:
        """Connect to the successor; `continue_calls` must follow without a pause.

        Args:
            link: the connection.
            request: makes the first message to it, from the requests without answers.
            expect: type of its answer.
            timeout_s: deadline.

        Raises:
            PlaneTimeout, PlaneLostError, and whatever the server answers.
        """
        self._link, self._fd, self._connected = link, link.fileno(), True
        self._loop.add_reader(self._fd, self._read)
        body = request(tuple(self._unanswered))
        call = Call(next(self._ids), self._loop.create_future(), body)
        self._resuming = self._pending[call.id] = call
        try:
            self._send(call.id, body)
            return await self.finish(call, expect, timeout_s)
        except BaseException:
            self._disconnect()
            link.close()
            raise
        finally:
            self._resuming = None

    def end_resume(self, why: str) -> None:
        """The successor has ended while `resume` waits for it: that raises PlaneLostError."""
        if self._resuming is not None and not self._resuming.answer.done():
            self._resuming.answer.set_exception(PlaneLostError(why))

    def continue_calls(self, answered: Callable[[Call], Answer | RLError | None]) -> None:
        """The successor serves: calls that wait are answered, fail, or are sent again (None)."""
        self._suspended = False
        self._unanswered.clear()
        for call in list(self._pending.values()):
            found = None if call.answer.done() else answered(call)
            if isinstance(found, RLError):
                call.answer.set_exception(found)
            elif found is not None:
                call.answer.set_result(found)
            elif not call.answer.done():
                try:
                    self._send(call.id, call.body)
                except BatchError as error:  # its caller called while there was no server
                    call.answer.set_exception(error)

    def _end_some(self, calls: Collection[Call], end: Callable[[Call], RLError | None]) -> None:
        for call in calls:
            error = None if call.answer.done() else end(call)
            if error is not None:
                call.answer.set_exception(error)

    def _disconnect(self) -> None:
        if self._connected:
            self._connected = False
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)

    def _end_connection(self, why: str) -> None:
        if self._resuming is not None:
            self.end_resume(why)
        elif not self._on_closed():
            self._disconnect()
            self.lose(why)

    def _fail(self, message: str) -> None:
        self._end_some(self._pending.values(), lambda _: PlaneLostError(message))

    def _leave(self, call: Call) -> None:
        self._unanswered.append(call.id)
        if self._lost is None and self._listening:
            self.tell(Cancel(call.id))

    def _look(self, answer: asyncio.Future[Answer | None]) -> bool:
        """Poll for an answer that comes at once; yields the processor, but not the event loop."""
        if self._link.near:
            until = time.monotonic() + LOOK_S
            while not answer.done() and time.monotonic() < until:
                os.sched_yield()  # the server may need this processor
                self._read()
        return answer.done()

    def _flush(self) -> None:
        if self._link.flush():
            self._loop.remove_writer(self._fd)

    def _read(self) -> None:
        if not self._connected:
            return
        try:
            for frame in self._link.receive():
                self.bytes_received += len(frame)
                self._take(_decoder.decode(frame))
                if not self._connected:
                    return
            if self._link.pending():
                self._loop.call_soon(self._read)
        except LinkClosed as closed:
            self._end_connection(f"The connection to the {self.name} of the data plane has ended: {closed}.")
        except UNREADABLE as error:
            self._disconnect()
            self.lose(f"The {self.name} of the data plane speaks another protocol: {error}.")

    def _take(self, reply: Reply) -> None:
        call = self._pending.get(reply.id)
        if call is not None and not call.answer.done():
            call.answer.set_result(reply.body)
        elif reply.id == NOTICE and self._on_notice is not None:
            self._on_notice(reply.body)
