"""TcpTransport: one member's connections of the TCP protocol (see tcp)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import os
import secrets
import selectors
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence

import msgspec

from rl_ckpt_engine.engines.base.memfd import Slot
from rl_ckpt_engine.engines.base.prefetch import Prefetch
from rl_ckpt_engine.engines.base.receive_buffer import Bucket
from rl_ckpt_engine.engines.base.sent_versions import Published
from rl_ckpt_engine.engines.network.tcp_secret import HOW_TO_SET
from rl_ckpt_engine.engines.network.tcp_server import (
    FOLLOWS,
    MAGIC,
    NONCE_BYTES,
    NOT_YET,
    PIECE_BYTES,
    REQUEST,
    BucketSender,
    Bytes,
    Server,
    SocketBucketSender,
    version_id,
)
from rl_ckpt_engine.payload.block_stream import Deadline
from rl_ckpt_engine.payload.manifest import DIGEST_BYTES, Manifest, decode_struct
from rl_protocol.errors import WeightSyncError
from rl_protocol.support.host.tcp_peers import expect_reader, notice_dead_peer
from rl_protocol.support.host_identity import this_host
from rl_protocol.support.shared_secret import PROOF_BYTES, Secret


class TcpMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Metadata of one member."""

    host: str
    port: int
    token: bytes
    """Random id of the engine object."""
    node: str
    """Host of the member; see rl_protocol.support.host_identity."""


_decoder = msgspec.msgpack.Decoder(TcpMember)


def _no_more() -> None:
    """Do nothing."""


class TcpTransport:
    """Sends published slots to receivers, or pulls buckets from a sender.

    Args:
        engine: name of the engine, for messages.
        host: address to listen on.
        key: key of the handshake.
        find: sync_id -> the version of that sync, or None; called in threads of the server.
        newest: the slot of the version that is being sent, or was sent last; also called in
            threads. None: nothing is sent before it is published.
        new_bucket_sender: creates the object that sends buckets over a new connection.
        receive_bucket: starts to receive a bucket.
        before_hang_up: called before the connection to the sender is closed.

    Attributes:
        lock: hold it while slots are closed, so that no thread opens one.
    """

    def __init__(
        self,
        engine: str,
        host: str,
        key: Secret,
        find: Callable[[bytes], Published[Slot] | None],
        *,
        newest: Callable[[], Slot | None] = lambda: None,
        new_bucket_sender: Callable[[], BucketSender] = SocketBucketSender,
        receive_bucket: Callable[[socket.socket, Bucket], BucketReceive] | None = None,
        before_hang_up: Callable[[], None] = _no_more,
    ) -> None:
        self._engine = engine
        self._host = host
        self._key = key
        self._find = find
        self._newest = newest
        self._new_bucket_sender = new_bucket_sender
        self._receive_bucket = BucketReceive if receive_bucket is None else receive_bucket
        self._before_hang_up = before_hang_up
        self._token = secrets.token_bytes(DIGEST_BYTES)
        self._server: Server | None = None
        self._connection: socket.socket | None = None
        self.lock = threading.Lock()

    def member(self) -> bytes:
        """Start to listen and return the metadata. A receiver does not listen if `host` is another
        host's address.

        Raises:
            WeightSyncError: it can't listen there.
        """
        if self._server is None:
            try:
                self._server = Server(
                    self._host, self._key, self._token, self._payload, self._written, self._new_bucket_sender
                )
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise WeightSyncError(f"Engine {self._engine!r} can't listen at {self._host}: {error}.") from error
        port = 0 if self._server is None else self._server.port
        return msgspec.msgpack.encode(TcpMember(host=self._host, port=port, token=self._token, node=this_host()))

    def sending_member(self) -> bytes:
        """The metadata of a sender.

        Raises:
            WeightSyncError: `host` is not an address of this host.
        """
        member = self.member()
        if self._server is None:
            raise WeightSyncError(
                f"Engine {self._engine!r} can't send from here: {self._host} is not an address of this host. "
                "Set CheckpointEngineConfig.listen to an address of the sender."
            )
        return member

    async def pull(self, manifest: Manifest, buckets: Sequence[Bucket], deadline: Deadline) -> AsyncGenerator[None]:
        """Fill the memory of each bucket in order and yield after each."""
        async with self._connected(manifest.sender, manifest.version, deadline) as peer:
            for number, bucket in enumerate(buckets):
                ahead = buckets[number + (number > 0) : number + 2]
                with self._named(manifest.version, deadline):
                    async with deadline.timeout():
                        await self._bucket(peer, manifest, bucket, ahead)
                yield

    async def pull_ahead(self, sender: bytes, buckets: Sequence[Bucket], prefetch: Prefetch) -> AsyncGenerator[None]:
        """Fill the buckets of a version that is being sent, in order, as far as it has been
        written."""
        async with self._connected(sender, prefetch.version, prefetch.deadline) as peer:
            for bucket in buckets:
                request = REQUEST.pack(version_id(prefetch.version), bucket.start, bucket.memory.nbytes)
                while not await self._written_bucket(peer, request, bucket, prefetch):
                    if not await prefetch.more():
                        return
                yield

    async def _written_bucket(self, peer: socket.socket, request: bytes, bucket: Bucket, prefetch: Prefetch) -> bool:
        """Receive a bucket if it has been written; returns whether it has."""
        with self._named(prefetch.version, prefetch.deadline):
            async with prefetch.deadline.timeout():
                await asyncio.get_running_loop().sock_sendall(peer, request)
                if (status := await _receive_bytes(peer, 1)) == NOT_YET:
                    return False
                if status != FOLLOWS:
                    raise WeightSyncError(
                        f"The sender of version {prefetch.version} sends nothing before its manifest."
                    )
                await self._receive_all(peer, bucket)
                return True

    def hang_up(self) -> None:
        """Close the connection to the sender; the next pull connects again."""
        self._before_hang_up()
        if self._connection is not None:
            with contextlib.suppress(OSError):  # ends a thread that still receives
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """End all connections; safe to call twice."""
        self.hang_up()
        if self._server is not None:
            self._server.close()

    def _payload(self, sync_id: bytes, offset: int, nbytes: int) -> Bytes | None:
        """A part of that sync's payload, or None; called in threads of the server."""
        with self.lock:
            published = self._find(sync_id)
            return None if published is None else published.held.payload(offset, nbytes)

    def _written(self, version: int, offset: int, nbytes: int) -> Bytes | None:
        """A part of a version that may be being sent, or None; called in threads of the server."""
        with self.lock:
            newest = self._newest()
            return None if newest is None else newest.written(version, offset, nbytes)

    async def _bucket(self, peer: socket.socket, manifest: Manifest, bucket: Bucket, ahead: Sequence[Bucket]) -> None:
        """Request the buckets `ahead`, then receive `bucket`."""
        for wanted in ahead:
            request = REQUEST.pack(manifest.sync_id, wanted.start, wanted.memory.nbytes)
            await asyncio.get_running_loop().sock_sendall(peer, request)
        if await _receive_bytes(peer, 1) != FOLLOWS:
            raise WeightSyncError(
                f"Version {manifest.version} is no longer available: the sender withdrew it or has a later version. "
                "A new sync is needed."
            )
        await self._receive_all(peer, bucket)

    async def _receive_all(self, peer: socket.socket, bucket: Bucket) -> None:
        receiving = self._receive_bucket(peer, bucket)
        try:
            await receiving.done()
        finally:
            await receiving.end()

    @contextlib.asynccontextmanager
    async def _connected(self, sender: bytes, version: int, deadline: Deadline) -> AsyncGenerator[socket.socket]:
        """The connection to the sender. It is closed if the block raises: answers to requests
        may still arrive."""
        finished = False
        try:
            with self._named(version, deadline):
                async with deadline.timeout():
                    peer = await self._dial(read_member(sender, self._engine))
            yield peer
            finished = True
        finally:
            if not finished:
                self.hang_up()

    @staticmethod
    @contextlib.contextmanager
    def _named(version: int, deadline: Deadline) -> Generator[None]:
        try:
            yield
        except TimeoutError:
            deadline.check()
            raise
        except OSError as error:
            raise WeightSyncError(
                f"The connection to the sender of version {version} broke: {error}. The sender died or closed; a new sync is needed."
            ) from error

    async def _dial(self, sender: TcpMember) -> socket.socket:
        """The connection of the last sync, or a new one if the sender closed it."""
        if self._connection is not None and _usable(self._connection):
            return self._connection
        self.hang_up()
        family = socket.AF_INET6 if ":" in sender.host else socket.AF_INET
        self._connection = peer = socket.socket(family, socket.SOCK_STREAM)
        peer.setblocking(False)
        notice_dead_peer(peer)
        expect_reader(peer)  # requests are so short that they wait for nobody
        loop = asyncio.get_running_loop()
        await loop.sock_connect(peer, (sender.host, sender.port))
        greeting = await _receive_bytes(peer, len(MAGIC) + NONCE_BYTES)
        if not greeting.startswith(MAGIC):
            raise WeightSyncError(
                f"{sender.host}:{sender.port} is not a sender of weights: it greets with {greeting[:4]!r}."
            )
        nonces = greeting[len(MAGIC) :] + (mine := os.urandom(NONCE_BYTES))
        await loop.sock_sendall(peer, mine + self._key.proof(b"receiver", nonces, sender.token))
        verdict = await _receive_bytes(peer, 1 + PROOF_BYTES)
        if not hmac.compare_digest(verdict, b"\x01" + self._key.proof(b"sender:::", nonces, sender.token)):
            raise WeightSyncError(
                f"The sender at {sender.host}:{sender.port} has a different key or was replaced by another process: {HOW_TO_SET}."
            )
        return peer


class BucketReceive:
    """Receives one bucket in a thread, which ends before the memory is used for anything else.

    Create and await it in an event loop.
    """

    def __init__(self, peer: socket.socket, bucket: Bucket) -> None:
        self._peer = peer
        self._work = asyncio.get_running_loop().run_in_executor(None, self.fill, bucket)

    def fill(self, bucket: Bucket) -> None:
        """Receive the bucket and verify each piece while it is in the cache; runs in the thread."""
        for end in self.receive(bucket.memory):
            bucket.verify(end)

    def receive(self, target: memoryview) -> Iterator[int]:
        """Receive bytes until the target is full; yields the number of bytes received so far.

        The thread waits for whole pieces: waking up for every packet takes twice the CPU time. It
        has its own file descriptor: `hang_up` may close the other one, and a selector does not
        report a closed one.
        """
        done = 0
        with self._peer.dup() as peer, selectors.DefaultSelector() as selector:
            selector.register(peer, selectors.EVENT_READ)
            try:
                while done < target.nbytes:
                    piece = target[done : done + PIECE_BYTES]
                    try:
                        got = peer.recv_into(piece)
                    except BlockingIOError:
                        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, piece.nbytes)
                        selector.select()
                        continue
                    if not got:
                        raise ConnectionResetError("closed by the sender")
                    done += got
                    yield done
            finally:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    async def done(self) -> None:
        """Wait until the bucket is complete.

        Raises:
            OSError: the connection broke.
        """
        await asyncio.shield(self._work)

    async def end(self) -> None:
        """Stop the thread; if the bucket is incomplete, this breaks the connection."""
        if not self._work.done():
            with contextlib.suppress(OSError):  # already broken
                self._peer.shutdown(socket.SHUT_RDWR)
            await asyncio.wait({self._work})
            self._work.exception()


async def _receive(peer: socket.socket, target: memoryview) -> None:
    loop = asyncio.get_running_loop()
    while target:
        got = await loop.sock_recv_into(peer, target)
        if not got:
            raise ConnectionResetError("closed by the sender")
        target = target[got:]


async def _receive_bytes(peer: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    await _receive(peer, memoryview(data))
    return bytes(data)


def _usable(peer: socket.socket) -> bool:
    """Whether the connection is open and has no unread bytes."""
    try:
        peer.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def read_member(metadata: bytes, engine: str) -> TcpMember:
    """Decode the metadata of a member.

    Raises:
        WeightSyncError: they are not from an engine that uses TCP.
    """
    return decode_struct(_decoder, metadata, f"metadata of an engine {engine!r}")
