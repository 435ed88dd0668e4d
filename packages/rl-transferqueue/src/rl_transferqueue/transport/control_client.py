"""The client's side of the control protocol: many concurrent calls over one link."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from itertools import count
from typing import NamedTuple, TypeVar

import msgspec

from rl_protocol.errors import UNREADABLE, PlaneLostError, PlaneTimeout, WireError
from rl_transferqueue.transport.unix_link import LOOK_S, Link, LinkClosed
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
    error_of,
    pack,
)

A = TypeVar("A", bound=msgspec.Struct)
_decoder = msgspec.msgpack.Decoder(Reply)
_LINGER_S = 0.5
_TURN_S = 1e-3
"""How long answers that come at once may keep the loop from others."""
CLOSED = "This client is closed; connect again."


class Call(NamedTuple):
    """A request that was sent."""

    id: int
    answer: asyncio.Future[Answer | None]
    """The answer; None: the deadline has passed."""


def _expire(answer: asyncio.Future[Answer | None]) -> None:
    if not answer.done():
        answer.set_result(None)


class ControlClient:
    """Requests and answers of one session with one server.

    A call that is cancelled or times out sends `Cancel`: the server gives back what the call took.
    A late answer is dropped.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        link: Link,
        name: str,
        on_notice: Callable[[Answer], None] | None = None,
    ) -> None:
        self.name = name
        self._on_notice = on_notice
        self.bytes_sent = 0
        self.bytes_received = 0
        self._loop = loop
        self._listening = True
        self._ids = count(1)
        self._pending: dict[int, asyncio.Future[Answer | None]] = {}
        self._received: list[int] = []
        """Calls that took something and have returned, which the server does not know yet."""
        self._ending = False
        self._lost: str | None = None
        self._turned = time.monotonic()
        """When a caller last yielded to the loop."""
        self._moved: LinkBytes | None = None
        self._link = link
        self._fd = link.fileno()
        loop.add_reader(self._fd, self._read)

    def start(self, body: AnyRequest) -> Call:
        """Send a request whose answer is awaited with `finish`.

        Raises:
            BatchError: the message can't be encoded; nothing was sent.
            PlaneLostError: the plane is gone, or the client is closed.
        """
        self.check()
        call = Call(self.tell(body), self._loop.create_future())
        self._pending[call.id] = call.answer
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
            raise PlaneTimeout(f"The {self.name} of the data plane did not answer within {timeout_s:g} s.")
        if isinstance(answer, Failure):
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
        if self._lost is not None:
            raise PlaneLostError(self._lost)
        request = next(self._ids)
        frame = pack(Request(request, body, tuple(self._received), self._moved))
        self._received.clear()
        self._moved = None
        self.bytes_sent += len(frame)
        if not self._link.send(frame) and self._listening:
            self._loop.add_writer(self._fd, self._flush)
        self._read_soon()
        return request

    def moved(self, nbytes: LinkBytes) -> None:
        """The client has moved so much: the next request says so, for the totals of all clients."""
        self._moved = nbytes if self._moved is None else self._moved + nbytes

    def check(self) -> None:
        """Raise PlaneLostError if the client is closed or the plane is gone."""
        if self._ending:
            raise PlaneLostError(CLOSED)
        if self._lost is not None:
            raise PlaneLostError(self._lost)

    def lose(self, message: str) -> None:
        """The server is gone: every call, now and later, raises PlaneLostError."""
        if self._lost is None:
            self._lost = message
            self._fail(message)

    def end_calls(self) -> None:
        """Close the client: current and later calls raise PlaneLostError."""
        self._ending = True
        for request, answer in self._pending.items():
            if not answer.done():
                answer.set_exception(PlaneLostError(CLOSED))
                with contextlib.suppress(PlaneLostError):
                    self.tell(Cancel(request))

    async def say_last(self, body: AnyRequest, timeout_s: float) -> None:
        """Send the last message of the session, and wait so long for the server to take notice.

        Raises:
            PlaneTimeout, PlaneLostError: see `finish`.
        """
        call = Call(self.tell(body), self._loop.create_future())
        if timeout_s > 0:
            self._pending[call.id] = call.answer
            await self.finish(call, Done, timeout_s)

    def mute(self) -> None:
        """Leave the loop: only `tell` may be used afterwards, by one thread at a time; nothing is
        read."""
        if self._listening:
            self._listening = False
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
            self._link.detach(_LINGER_S)
            self._fail(CLOSED)

    def close(self) -> None:
        """Close the socket; messages sent last have half a second to leave."""
        self.mute()
        self.lose(CLOSED)
        self._link.close()

    def _fail(self, message: str) -> None:
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(PlaneLostError(message))

    def _leave(self, call: Call) -> None:
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

    def _read_soon(self) -> None:
        if self._listening and self._link.pending():
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        if not self._listening:
            return
        try:
            for frame in self._link.receive():
                self.bytes_received += len(frame)
                self._take(_decoder.decode(frame))
                if not self._listening:
                    return
            self._read_soon()
        except LinkClosed as closed:
            self._loop.remove_reader(self._fd)
            self.lose(f"The connection to the {self.name} of the data plane has ended: {closed}.")
        except UNREADABLE as error:
            self._loop.remove_reader(self._fd)
            self.lose(f"The {self.name} of the data plane speaks another protocol: {error}.")

    def _take(self, reply: Reply) -> None:
        answer = self._pending.get(reply.id)
        if answer is not None and not answer.done():
            answer.set_result(reply.body)
        elif reply.id == NOTICE and self._on_notice is not None:
            self._on_notice(reply.body)
