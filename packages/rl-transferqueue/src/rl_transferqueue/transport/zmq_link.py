"""A link to a server of another host: a ZeroMQ DEALER socket, encrypted if there is a key."""

from __future__ import annotations

import contextlib

import zmq

from rl_transferqueue.transport.plane_secret import PlaneKey
from rl_transferqueue.wire.messages import MAX_FRAME

_BURST = 256
_LINGER_MS = 500


class ZmqLink:
    """A `Link` over ZeroMQ, which reconnects by itself."""

    def __init__(self, address: str, session: bytes, key: PlaneKey) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, session)
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
