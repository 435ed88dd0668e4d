"""A link to a server of another host: a ZeroMQ DEALER socket, encrypted if there is a key.

Its identity:

    offset  size  content
    0       S     the session
    S       4     incarnation of the controller, little-endian unsigned; missing: any server

A link reconnects by itself, perhaps to the successor of the controller that it was meant for. The
successor drops its frames: what they ask for was meant for the controller before.
"""

from __future__ import annotations

import contextlib

import zmq

from rl_transferqueue.transport.bulk_protocol import SESSION_BYTES
from rl_transferqueue.transport.plane_secret import PlaneKey
from rl_transferqueue.wire.messages import MAX_FRAME

_BURST = 256
_LINGER_MS = 500
_INCARNATION_BYTES = 4


class ZmqLink:
    """A `Link` over ZeroMQ, which reconnects by itself.

    Args:
        address: endpoint of the server.
        session: identity of the session.
        key: that of the plane.
        incarnation: of the controller that is meant. Another one at this address drops all frames,
            also those that this link sends again after it has reconnected. 0: any server.
    """

    def __init__(self, address: str, session: bytes, key: PlaneKey, incarnation: int = 0) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, link_identity(session, incarnation))
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.IPV6, int("[" in address))
        key.protect_client(self._socket)
        self._socket.connect(address)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """What a server's event loop watches."""
        return self._socket

    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def send(self, frame: bytes) -> bool:
        with contextlib.suppress(zmq.Again):  # refused: the call times out
            self._socket.send(frame, zmq.DONTWAIT)
        return True

    def flush(self) -> bool:
        return True

    def receive(self) -> list[bytes]:
        frames: list[bytes] = []
        while len(frames) < _BURST:
            try:
                frames.append(self._socket.recv(zmq.DONTWAIT))
            except zmq.Again:
                break
        return frames

    def pending(self) -> bool:
        return not self._socket.closed and bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    @property
    def near(self) -> bool:
        return False

    def detach(self, timeout_s: float) -> None:
        """ZeroMQ keeps what is sent until it has left, or until LINGER is over."""

    def close(self) -> None:
        self._socket.close()


def link_identity(session: bytes, incarnation: int) -> bytes:
    """Identity of a link of the session.

    >>> link_identity(b"session1", 2), link_identity(b"session1", 0)
    (b'session1\\x02\\x00\\x00\\x00', b'session1')
    """
    return session + (incarnation.to_bytes(_INCARNATION_BYTES, "little") if incarnation else b"")


def session_of(identity: bytes, incarnation: int) -> bytes | None:
    """The session of a link; None: it is meant for another controller than this one.

    >>> identity = link_identity(b"session1", 2)
    >>> session_of(identity, 2), session_of(identity, 3), session_of(b"session1", 3)
    (b'session1', None, b'session1')

    Args:
        identity: of the link.
        incarnation: of this controller; 0: this server is no controller.
    """
    if not incarnation or len(identity) != SESSION_BYTES + _INCARNATION_BYTES:
        return identity
    session = identity[:SESSION_BYTES]
    return session if identity == link_identity(session, incarnation) else None
