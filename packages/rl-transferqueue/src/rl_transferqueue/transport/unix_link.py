"""Frames over unix sockets, between processes of one host.

    offset  size  content
    0       4     N, length of the frame, little-endian unsigned, at most MAX_FRAME
    4       N     the frame

* The first frame a client sends MUST be its session's identity (8 bytes, or CONTROLLER); the server
  sends nothing before.
* A reader MUST close the connection when a longer frame is announced, and allocates memory only for
  bytes that arrived.
* A server ends a connection that is silent before its first request, or stalls
  (`connection_limits`).
"""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import Protocol

from rl_protocol.errors import PlaneLostError
from rl_transferqueue.wire.messages import MAX_FRAME

SCHEME = "unix:"
LOOK_S = 100e-6
"""How long either side polls for an expected frame before it sleeps; waking up often costs more."""
_PREFIX = 4
_READ = 1 << 16
"""Bytes per read; malloc maps and unmaps buffers from 128 KiB on, which costs ten short reads."""
_SEND_BUFFER = 1 << 20
"""Bytes that the kernel holds for the reader, as far as net.core.wmem_max allows. With its default
of 208 KiB, a list of 65,536 keys needs a dozen turns of both processes."""
_BACKLOG = 1024
_CREDENTIALS = struct.Struct("3i")
"""pid, uid, gid."""


class LinkClosed(Exception):
    """The other side has closed the connection, or has sent an impossible frame header."""


class Link(Protocol):
    """One end of a connection; used by one thread at a time, never waits."""

    def fileno(self) -> int:
        """What to wait on before `receive`, and before `flush`."""
        ...

    def send(self, frame: bytes) -> bool:
        """Send a frame; False: a part waits, call `flush` once the link can be written."""
        ...

    def flush(self) -> bool:
        """Send what is left; whether all has."""
        ...

    def receive(self) -> list[bytes]:
        """Frames that have come, perhaps none; there may be more.

        Raises:
            LinkClosed: none will come any more.
        """
        ...

    def pending(self) -> bool:
        """Whether frames have come that `fileno` will not announce."""
        ...

    @property
    def near(self) -> bool:
        """Whether an answer can come within LOOK_S."""
        ...

    def detach(self, timeout_s: float) -> None:
        """From here on `send` waits until a frame has left, so long; nothing is received."""
        ...

    def close(self) -> None: ...


class Frames:
    """Cuts a stream of bytes into frames.

    >>> frames = Frames()
    >>> frames.feed(b"\\x02\\x00\\x00\\x00ab\\x01"), frames.feed(b"\\x00\\x00\\x00c")
    ([b'ab'], [b'c'])
    """

    def __init__(self) -> None:
        self._rest = bytearray()

    def __len__(self) -> int:
        """Bytes of a frame of which the rest has not come."""
        return len(self._rest)

    def feed(self, data: bytes) -> list[bytes]:
        """Frames that are complete with these bytes.

        Raises:
            LinkClosed: a frame longer than MAX_FRAME is announced.
        """
        if not self._rest and len(data) == _PREFIX + int.from_bytes(data[:_PREFIX], "little") <= MAX_FRAME:
            return [data[_PREFIX:]]  # one whole frame, as most reads bring
        if self._rest:
            self._rest += data
            left = len(self._rest) - self._wanted(self._rest, 0)
            if left < 0:
                return []
            whole, self._rest = self._rest, bytearray()
            if not left:  # a long frame: copied once
                return [bytes(memoryview(whole)[_PREFIX:])]
            data = bytes(whole)
        frames: list[bytes] = []
        at, end = 0, len(data)
        while end - at >= (stop := self._wanted(data, at)):
            frames.append(data[at + _PREFIX : at + stop])
            at += stop
            if at == end:
                return frames
        self._rest += data[at:]
        return frames

    @staticmethod
    def _wanted(data: bytes | bytearray, at: int) -> int:
        """Bytes from `at` up to the end of the frame, as far as that is known."""
        if len(data) - at < _PREFIX:
            return _PREFIX
        size = int.from_bytes(data[at : at + _PREFIX], "little")
        if size > MAX_FRAME:
            raise LinkClosed(f"a frame of {size} bytes was announced, the limit is {MAX_FRAME}")
        return _PREFIX + size


class UnixLink:
    """A `Link` over a unix socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._socket = connection
        self._frames = Frames()
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: bytes) -> bool:
        packed = len(frame).to_bytes(_PREFIX, "little") + frame
        if self._unsent:
            self._unsent += packed
            return False
        sent = self._send(packed)
        if sent == len(packed):
            return True
        self._unsent += packed[sent:]
        return self.flush() if self._socket.gettimeout() else False

    def flush(self) -> bool:
        while self._unsent:
            sent = self._send(self._unsent)
            if not sent:
                return False
            del self._unsent[:sent]
        return True

    def receive(self) -> list[bytes]:
        try:
            data = self._socket.recv(_READ)
        except BlockingIOError:
            return []
        except OSError as error:
            raise LinkClosed(str(error)) from error
        if not data:
            raise LinkClosed("the connection was closed")
        return self._frames.feed(data)

    def pending(self) -> bool:
        return False

    @property
    def unfinished(self) -> bool:
        """Whether a part of a frame waits to be sent, or to come."""
        return bool(self._unsent) or len(self._frames) > 0

    @property
    def unsent(self) -> int:
        """Bytes that `flush` has to send."""
        return len(self._unsent)

    @property
    def partial(self) -> int:
        """Bytes of a frame of which the rest has not come."""
        return len(self._frames)

    @property
    def peer(self) -> str:
        """The process at the other end, for people; macOS does not say which it is."""
        if not hasattr(socket, "SO_PEERCRED"):
            return "a process of this host"
        try:
            packed = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:
            return "a process that is gone"
        return f"pid {_CREDENTIALS.unpack(packed)[0]}"

    @property
    def near(self) -> bool:
        return True

    def detach(self, timeout_s: float) -> None:
        self._socket.settimeout(timeout_s)

    def close(self) -> None:
        """Close the socket and give back what was not sent or has come in part."""
        self._socket.close()
        self._frames = Frames()
        self._unsent = bytearray()

    def _send(self, data: bytes | bytearray) -> int:
        """Send bytes; returns how many were sent.

        If the peer is gone, all are dropped: `receive` raises.
        """
        try:
            return self._socket.send(data)
        except (BlockingIOError, TimeoutError):
            return 0
        except OSError:
            return len(data)


def connect_unix(address: str, session: bytes, name: str) -> UnixLink:
    """Connect to a server of this host at `unix:<path>`.

    Raises:
        PlaneLostError: no process listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(address.removeprefix(SCHEME))
    except OSError as error:
        connection.close()
        raise PlaneLostError(f"The {name} of the data plane does not run at {address}: {error}.") from error
    link = UnixLink(connection)
    link.send(session)
    return link


def listen_unix(address: str) -> socket.socket:
    """A listening socket at `unix:<path>`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address.removeprefix(SCHEME))
    listener.listen(_BACKLOG)
    return listener


def socket_path(directory: Path, name: str) -> str:
    """The address of a server whose socket lies in that directory."""
    return f"{SCHEME}{directory / name}"
