"""The sender's side of the TCP protocol: threads that answer receivers (see tcp)."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rl_ckpt_engine.payload.manifest import DIGEST_BYTES
from rl_protocol.support.host.tcp_peers import notice_dead_peer
from rl_protocol.support.shared_secret import PROOF_BYTES, Secret

_log = logging.getLogger(__name__)

MAGIC = b"RLW1"
NONCE_BYTES = 32
HANDSHAKE_S = 5.0
_PAUSE_S = 0.5
"""Pause after a connection that failed: the process may have no file descriptor or thread left."""
PIECE_BYTES = 512 << 10
"""Bytes of one call of the socket: few calls, and a receiver hashes them while they are in the
cache."""
Bytes = npt.NDArray[np.uint8]
REQUEST = struct.Struct(f"<{DIGEST_BYTES}sQQ")
_VERSION_ID = struct.Struct("<8sQ")
_NO_SYNC_ID = b"\xff" * 8
GONE, FOLLOWS, NOT_YET = b"\x00", b"\x01", b"\x02"


def version_id(version: int) -> bytes:
    """What a request has instead of a sync_id to ask for a version that is being sent."""
    return _VERSION_ID.pack(_NO_SYNC_ID, version)


class BucketSender(Protocol):
    """Sends buckets of published memory over one connection; used by the thread of that
    connection."""

    def deliver(self, peer: socket.socket, payload: Bytes) -> None:
        """Send the bytes of a bucket, uint8 [nbytes].

        Raises:
            OSError: the connection broke or must be closed.
        """
        ...

    def close(self) -> None:
        """Release resources after the connection has ended."""
        ...


class SocketBucketSender:
    """Sends the bytes over the connection.

    They are copied into the socket. sendfile would save that copy, but hands over single pages,
    which cost the receiver three times as much CPU time. A call for each piece lets the kernel
    handle acknowledgments in between; one call for all bytes takes twice the time on loopback.
    """

    def deliver(self, peer: socket.socket, payload: Bytes) -> None:
        data = payload.data
        for start in range(0, data.nbytes, PIECE_BYTES):
            peer.sendall(data[start : start + PIECE_BYTES])

    def close(self) -> None:
        """Do nothing."""


class Server:
    """Threads that send published memory to receivers; they read only copies, never the
    trainer's tensors.

    Args:
        host: address to listen on.
        key: key of the handshake.
        token: the sender's token.
        payload: sync_id, offset, size -> that part of its payload, or None.
        written: the same of a version that may be being sent; None if it has not been written.
        new_bucket_sender: creates the bucket sender of a connection.
    """

    def __init__(
        self,
        host: str,
        key: Secret,
        token: bytes,
        payload: Callable[[bytes, int, int], Bytes | None],
        written: Callable[[int, int, int], Bytes | None],
        new_bucket_sender: Callable[[], BucketSender],
    ) -> None:
        self._key = key
        self._token = token
        self._payload = payload
        self._written = written
        self._new_bucket_sender = new_bucket_sender
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._peers: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="rl-ckpt-tcp", daemon=True).start()

    def close(self) -> None:
        """End all connections; safe to call twice."""
        with self._lock:
            self._closed.set()
            with contextlib.suppress(OSError):  # wakes the thread in accept
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            for peer in self._peers:
                with contextlib.suppress(OSError):  # wakes its thread, which closes it
                    peer.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError as error:  # closed, no room, or the receiver has left already
                if self._closed.is_set():
                    return
                _log.warning("A receiver's connection could not be accepted: %s.", error)
                self._closed.wait(_PAUSE_S)
                continue
            with self._lock:
                if self._closed.is_set():
                    peer.close()
                    return
                self._peers.add(peer)
            self._start(peer)

    def _start(self, peer: socket.socket) -> None:
        """Serve a connection in a thread of its own, or close it where the process can have no more
        threads."""
        try:
            threading.Thread(target=self._serve, args=(peer,), name="rl-ckpt-tcp-peer", daemon=True).start()
        except RuntimeError as error:
            _log.warning("A receiver's connection could not be served: %s.", error)
            with self._lock:
                self._peers.discard(peer)
            peer.close()
            self._closed.wait(_PAUSE_S)

    def _serve(self, peer: socket.socket) -> None:
        try:
            with peer, contextlib.closing(self._new_bucket_sender()) as bucket_sender:
                notice_dead_peer(peer)
                if self._shake_hands(peer):
                    peer.settimeout(None)
                    while self._answer(peer, bucket_sender):
                        pass
        except OSError as error:  # the receiver disconnected, which is no error here
            _log.debug("A receiver's connection ended: %s.", error)
        finally:
            with self._lock:
                self._peers.discard(peer)

    def _shake_hands(self, peer: socket.socket) -> bool:
        end = time.monotonic() + HANDSHAKE_S
        peer.settimeout(HANDSHAKE_S)
        mine = os.urandom(NONCE_BYTES)
        peer.sendall(MAGIC + mine)
        answer = _read_exactly(peer, NONCE_BYTES + PROOF_BYTES, end)
        nonces = mine + answer[:NONCE_BYTES]
        if not hmac.compare_digest(answer[NONCE_BYTES:], self._key.proof(b"receiver", nonces, self._token)):
            _log.warning("A receiver was refused: it has another key, or expected another sender.")
            peer.sendall(bytes(1 + PROOF_BYTES))
            return False
        peer.sendall(b"\x01" + self._key.proof(b"sender:::", nonces, self._token))
        return True

    def _answer(self, peer: socket.socket, bucket_sender: BucketSender) -> bool:
        request = _read_exactly(peer, REQUEST.size)
        if not request:
            return False
        sync_id, offset, nbytes = REQUEST.unpack(request)
        mark, version = _VERSION_ID.unpack(sync_id)
        early = mark == _NO_SYNC_ID
        payload = self._written(version, offset, nbytes) if early else self._payload(sync_id, offset, nbytes)
        if payload is None:
            peer.sendall(NOT_YET if early else GONE)
            return early
        peer.sendall(FOLLOWS)
        bucket_sender.deliver(peer, payload)
        return True


def _read_exactly(peer: socket.socket, count: int, end: float | None = None) -> bytes:
    """Read `count` bytes; empty at the end of the stream.

    Raises:
        TimeoutError: they have not arrived by `end`, in seconds of the monotonic clock.
    """
    data = b""
    while len(data) < count:
        if end is not None:
            if (left_s := end - time.monotonic()) <= 0:
                raise TimeoutError("the handshake took too long")
            peer.settimeout(left_s)
        more = peer.recv(count - len(data))
        if not more:
            return b""
        data += more
    return data
