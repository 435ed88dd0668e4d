"""Calls of a worker process over a Unix socket, which take less time than Ray's.

Each side sends frames: their length in 4 bytes, little-endian, and a message in msgpack. The driver
sends a Request, the worker an Answer with its number; answers come in any order. A Cancel ends the
work of a request whose caller waits no longer, if its method is one of CANCELLED; the other methods
change state, and run to their end.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import cast

import msgspec

from rl_app_ppo.config.placement import Role
from rl_protocol import WorkerError

_LENGTH = struct.Struct("<I")
CANCELLED = frozenset({"rollout"})
"""Methods whose work ends when the driver cancels the call."""
Call = Callable[[Role, str, bytes], Awaitable[bytes]]
"""(role, method, payload) -> answer."""


class Request(msgspec.Struct, frozen=True, array_like=True, tag=0, forbid_unknown_fields=True):
    """A call of the worker of a role."""

    number: int
    """Unique among the calls of a connection."""
    role: Role
    method: str
    payload: bytes


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """The caller of this request waits no longer; there is no answer."""

    number: int


class Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a call returned; None: it failed, and the worker keeps its error."""

    number: int
    payload: bytes | None


def frame(message: msgspec.Struct) -> bytes:
    """A message as a frame.

    Raises:
        WorkerError: it has 4 GiB or more.
    """
    data = msgspec.msgpack.encode(message)
    if len(data) >> 32:
        raise WorkerError(f"A call of a worker or its answer has {len(data)} bytes; at most 4 GiB can be sent.")
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Cuts a stream of bytes into the messages of its frames.

    >>> frames = Frames()
    >>> [list(frames.feed(part)) for part in (bytes([1, 0, 0]), bytes([0, 7, 0, 0]), bytes([0, 0]))]
    [[], [b'\\x07'], [b'']]
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Generator[bytes]:
        """Take the next bytes; yields the messages that are complete."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            message = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield message


class CallServer:
    """The worker's side: runs requests side by side, in the event loop of `listen`.

    Args:
        call: answers a request.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._failed: dict[int, BaseException] = {}

    async def listen(self, path: Path) -> asyncio.Server:
        """Listen at a path that does not exist yet, for the one driver that connects.

        Raises:
            OSError: it can't listen there.
        """
        loop = asyncio.get_running_loop()
        return await loop.create_unix_server(lambda: _ServerSide(self._call, self._failed), str(path))

    def take_error(self, number: int) -> BaseException:
        """The error of a call that failed, once."""
        return self._failed.pop(number)


class _ServerSide(asyncio.Protocol):
    def __init__(self, call: Call, failed: dict[int, BaseException]) -> None:
        self._call = call
        self._failed = failed
        self._frames = Frames()
        self._running = dict[int, asyncio.Future[bytes]]()
        """Work by the number of its request."""
        self._cancelled = set[int]()
        """Requests to which no answer is sent."""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            request = msgspec.msgpack.decode(message, type=Request | Cancel)
            if isinstance(request, Cancel):
                if request.number in self._running:
                    self._cancelled.add(request.number)
                    self._running[request.number].cancel()
                continue
            task = asyncio.ensure_future(self._call(request.role, request.method, request.payload))
            self._running[request.number] = task
            task.add_done_callback(lambda task, number=request.number: self._answer(number, task))

    def _answer(self, number: int, task: asyncio.Future[bytes]) -> None:
        del self._running[number]
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if number in self._cancelled:
            self._cancelled.discard(number)
            return
        if error is not None:
            self._failed[number] = error
        assert self._transport is not None
        self._transport.write(frame(Answer(number, None if error is not None else task.result())))


class Connection:
    """The driver's side; made by `connect`."""

    def __init__(self, side: _DriverSide) -> None:
        self._side = side
        self._last = 0

    @classmethod
    async def connect(cls, path: Path) -> Connection:
        """Connect to a worker.

        Raises:
            OSError: nothing listens at the path.
        """
        _, side = await asyncio.get_running_loop().create_unix_connection(_DriverSide, str(path))
        return cls(side)

    async def call(self, role: Role, method: str, payload: bytes) -> Answer:
        """Call the worker of a role.

        Raises:
            ConnectionResetError: the worker's end of the connection is gone.
        """
        self._last += 1
        return Answer(self._last, await self._side.send(Request(self._last, role, method, payload)))

    def close(self) -> None:
        """Close the connection."""
        self._side.close()


class _DriverSide(asyncio.Protocol):
    def __init__(self) -> None:
        self._frames = Frames()
        self._open: dict[int, asyncio.Future[bytes | None]] = {}
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    async def send(self, request: Request) -> bytes | None:
        transport = self._transport
        if transport is None:
            raise ConnectionResetError("the connection is closed")
        answer = self._open[request.number] = asyncio.get_running_loop().create_future()
        try:
            transport.write(frame(request))
            return await answer
        except asyncio.CancelledError:
            if request.method in CANCELLED and not transport.is_closing():
                transport.write(frame(Cancel(request.number)))
            raise
        finally:
            del self._open[request.number]

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            answer = msgspec.msgpack.decode(message, type=Answer)
            waiting = self._open.get(answer.number)  # None: the caller waited for it no longer
            if waiting is not None and not waiting.done():
                waiting.set_result(answer.payload)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._transport = None
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(ConnectionResetError("the worker closed the connection"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
