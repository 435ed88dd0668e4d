"""Calls of an endpoint in another process of this host, over a Unix socket.

    trainer, rollout   async with serve(endpoint, path): ...
    manager            handle = await connect(ReceiverEndpoint, path)

Only processes of the same user can connect. A call is a connection with one frame in each
direction: 4 bytes of length, little-endian, and a message in msgpack.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from rl_ckpt_engine.endpoints.operations import METHODS, Endpoint, remote
from rl_protocol import errors
from rl_protocol.errors import UNREADABLE, ConfigError, RLError, WorkerDiedError, WorkerError
from rl_protocol.support.host.portable import SOCKET_PATH_LIMIT

_LENGTH = struct.Struct("<I")
_MOST_BYTES = 256 << 20
"""Of a message. The weights take another way; a manifest has about 100 bytes per tensor."""
_REQUEST_S = 60.0
"""A client that has not sent its request by then is cut off."""
_RETRY_S = 0.05
_ERRORS: Mapping[str, type[RLError]] = {
    name: each for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, RLError)
}
E = TypeVar("E", bound=Endpoint)


class _Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    method: str
    payload: bytes


class _Result(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0):
    payload: bytes


class _Error(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    kind: str
    message: str


@asynccontextmanager
async def serve(endpoint: Endpoint, path: str | Path) -> AsyncGenerator[None]:
    """Answer calls of the endpoint's operations at `path` until the context ends.

    Calls that run at its end are cancelled.

    Args:
        endpoint: runs the calls, in this event loop.
        path: of the socket, removed at the end. A socket that a killed process has left there is
            replaced.

    Raises:
        ConfigError: another process serves the path, it is no socket, or none can be made there.
    """
    path = Path(path)
    running = set[asyncio.Task[None]]()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_answer(endpoint, reader, writer))
        running.add(task)
        task.add_done_callback(lambda done: (running.discard(done), writer.close()))
        if not server.is_serving():  # it came while the context ended
            task.cancel()

    try:
        _make_free(path)
        server = await asyncio.start_unix_server(connected, path, start_serving=False)
        _make_private(path)  # before the first connection is possible
        await server.start_serving()
    except OSError as error:
        raise ConfigError(
            f"No socket can be made at {path}: {error}. A path has at most {SOCKET_PATH_LIMIT} bytes."
        ) from error
    try:
        yield
    finally:
        server.close()
        _remove(path)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def connect(endpoint: type[E], path: str | Path, *, name: str = "", timeout_s: float = 60.0) -> E:
    """A handle of the endpoint that another process serves at `path`, for the manager.

    Args:
        endpoint: class of the endpoint.
        path: as given to `serve`.
        name: of the other process in messages and metrics, unique among the replicas; empty: that
            of the path.
        timeout_s: how long to wait until it serves. Later calls do not wait for a process that is
            gone.

    Raises:
        WorkerDiedError: no process serves the path in time.
    """
    path = Path(path)
    caller = _Caller(path, name or path.stem)
    try:
        async with asyncio.timeout(timeout_s):
            await caller.reach()
    except TimeoutError:
        raise WorkerDiedError(f"No process has served {path} within {timeout_s:g} s.") from None
    return remote(endpoint, caller)


class _Caller:
    """Carries calls to the process that serves `path`; see `operations.Caller`."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self.name = name

    async def reach(self) -> None:
        """Wait until the process serves the path."""
        while True:
            try:
                _, writer = await asyncio.open_unix_connection(self._path)
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(_RETRY_S)
            else:
                await _close(writer)
                return

    async def call(self, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        async with asyncio.timeout(timeout_s):
            answer = await self._exchange(_frame(_Request(method, payload)))
        if isinstance(answer, _Result):
            return answer.payload
        raise _ERRORS.get(answer.kind, WorkerError)(f"{self.name}: {answer.message}")

    async def _exchange(self, request: bytes) -> _Result | _Error:
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
            try:
                writer.write(request)
                return msgspec.msgpack.decode(await _read(reader), type=_Result | _Error)
            finally:
                await _close(writer)
        except (ConnectionError, FileNotFoundError, asyncio.IncompleteReadError) as error:
            raise WorkerDiedError(
                f"{self.name} has not answered: it is gone, or the call failed there, which its standard error says."
            ) from error
        except UNREADABLE as error:
            raise WorkerError(f"{self.name} sent an unreadable answer: {error}.") from error


async def _answer(endpoint: Endpoint, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the one call of a connection."""
    try:
        async with asyncio.timeout(_REQUEST_S):
            message = await _read(reader)
    except (OSError, asyncio.IncompleteReadError):  # it is gone, late, or was only `connect`
        return
    writer.write(_frame(await _answered(endpoint, message)))
    with contextlib.suppress(OSError):  # the caller waits no longer
        await writer.drain()


async def _answered(endpoint: Endpoint, message: bytes) -> _Result | _Error:
    try:
        request = msgspec.msgpack.decode(message, type=_Request)
        return _Result(await endpoint.handle(request.method.removeprefix(METHODS), request.payload))
    except RLError as error:
        return _Error(type(error).__name__, str(error))
    except UNREADABLE as error:
        return _Error(WorkerError.__name__, f"unreadable request: {error}")
    except OSError as error:  # TimeoutError is one
        return _Error(WorkerError.__name__, f"{type(error).__name__}: {error}")


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):  # the other end is gone
        await writer.wait_closed()


async def _read(reader: asyncio.StreamReader) -> bytes:
    size = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]
    if size > _MOST_BYTES:
        raise WorkerError(f"A message has {size} bytes; at most {_MOST_BYTES} are read.")
    return await reader.readexactly(size)


def _frame(message: msgspec.Struct) -> bytes:
    data = msgspec.msgpack.encode(message)
    if len(data) > _MOST_BYTES:
        raise WorkerError(f"A message has {len(data)} bytes; at most {_MOST_BYTES} can be sent.")
    return _LENGTH.pack(len(data)) + data


def _make_free(path: Path) -> None:
    """Remove the socket of a process that was killed: nobody listens there."""
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a server with a full queue would block it
        refused = probe.connect_ex(str(path)) == errno.ECONNREFUSED
    if not (refused and path.is_socket()):  # connections to a file are refused, too
        raise ConfigError(f"{path} exists: another process serves it, or it is no socket. Set another path.")
    _remove(path)


def _make_private(path: Path) -> None:
    path.chmod(0o600)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
