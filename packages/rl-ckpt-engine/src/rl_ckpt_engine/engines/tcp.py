"""Engine `tcp`: the sender copies the weights once into memory of its own; receivers pull them over TCP, on the same host or another.

    sender -> receiver   b"RLW1", nonce [32]
    receiver -> sender   nonce [32], proof [32]
    sender -> receiver   1 byte (1: accepted, 0: refused), proof [32]
    then, any number of times
    receiver -> sender   sync_id [16], u64 offset, u64 size, little-endian
    sender -> receiver   1 byte (1: the bytes follow, 0: that sync can't be read any more), `size` bytes of the payload

* Proofs are HMAC-SHA256 over both nonces and the sender's random token, so they prove the key, can't be replayed, and another process that took
  the port of a dead sender is noticed. Without a key they are made with the empty key, which only loopback allows.
* The sender MUST end a connection that has not finished the handshake within `HANDSHAKE_S`.
* What follows the handshake is neither encrypted nor authenticated byte by byte; the manifest, which comes another way, has the digests.
* A receiver asks for the next bucket before it has the former one, so that the sender is never idle while the receiver hashes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import ipaddress
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from typing import ClassVar, Protocol

import msgspec

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.engine import Capabilities
from rl_ckpt_engine.engines.copying import CopyingEngine
from rl_ckpt_engine.engines.memfd import PAYLOAD_START, Slot
from rl_ckpt_engine.keys import HOW_TO_SET, load_key
from rl_ckpt_engine.manifest import DIGEST_BYTES, Manifest, decode_struct
from rl_ckpt_engine.staging import Bucket
from rl_ckpt_engine.stream import Deadline
from rl_protocol.errors import ConfigError, WeightSyncError
from rl_protocol.hosts import this_host
from rl_protocol.secret import PROOF_BYTES, Secret

_log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MAGIC = b"RLW1"
NONCE_BYTES = 32
HANDSHAKE_S = 5.0
DEAD_AFTER_S = 5
_REQUEST = struct.Struct(f"<{DIGEST_BYTES}sQQ")
_RECV_BYTES = 1 << 20


class TcpMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Metadata of one member."""

    host: str
    port: int
    token: bytes
    """Random name of the engine object."""
    node: str
    """Which host, see rl_protocol.hosts."""


_decoder = msgspec.msgpack.Decoder(TcpMember)


class TcpEngine(CopyingEngine[Slot]):
    """See the module's docstring. A sender's memory is that of its two largest versions, a receiver's that of its largest.

    Raises:
        ConfigError: `listen` is no address, or not loopback without a key.
    """

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "tcp"
    capabilities: ClassVar[Capabilities] = Capabilities(
        same_host_only=False, zero_copy=False, elastic=True, devices=("cpu",)
    )

    def __init__(self, config: CheckpointEngineConfig | None = None) -> None:
        super().__init__(config)
        self._key = load_key()
        self._host = _listen_address(self._config.listen, self._key)
        self._token = secrets.token_bytes(DIGEST_BYTES)
        self._server: Server | None = None
        self._connection: socket.socket | None = None
        self._closing = threading.Lock()

    def prepare(self) -> bytes:
        """See CheckpointEngine.prepare; listens from here on, unless `listen` is another host's address, as it is at receivers elsewhere."""
        if self._server is None:
            try:
                self._server = Server(self._host, self._key, self._token, self._open, self._new_courier)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise WeightSyncError(f"Engine 'tcp' can't listen at {self._host}: {error}.") from error
        port = 0 if self._server is None else self._server.port
        return msgspec.msgpack.encode(TcpMember(host=self._host, port=port, token=self._token, node=this_host()))

    def _identity(self) -> bytes:
        member = self.prepare()
        if self._server is None:
            raise WeightSyncError(
                f"Engine 'tcp' can't send from here: {self._host} is no address of this host. Set checkpoint_engine.listen to the sender's."
            )
        return member

    @classmethod
    def _check_members(cls, sender: bytes, receivers: Sequence[bytes]) -> None:
        for member in (sender, *receivers):
            read_member(member, cls.name)

    def init_process_group(self, member: bytes) -> None:
        """See CheckpointEngine.init_process_group."""
        if member != self._sender:
            self._hang_up()
        super().init_process_group(member)

    def close(self) -> None:
        """See CheckpointEngine.close."""
        self._hang_up()
        if self._server is not None:
            self._server.close()
        with self._closing:
            super().close()

    def _new_place(self) -> Slot:
        return Slot()

    def _new_courier(self) -> Courier:
        """Sender: for a connection that has begun."""
        return FileCourier()

    def _receiving(self, peer: socket.socket, target: memoryview) -> Receiving:
        """Receiver: begin to take what a courier brings."""
        return Receiving(peer, target)

    def _open(self, sync_id: bytes) -> int | None:
        """For the server's threads: a file descriptor of that sync's memory, to be closed by them."""
        with self._closing:
            published = self._ledger.find(sync_id)
            return None if published is None else os.dup(published.held.fd)

    async def _pull(self, manifest: Manifest, buckets: Sequence[Bucket], deadline: Deadline) -> AsyncGenerator[None]:
        finished = False
        try:
            with self._named(manifest.version, deadline):
                async with deadline.timeout():
                    peer = await self._dial(read_member(manifest.sender, self.name))
            for number, bucket in enumerate(buckets):
                ahead = buckets[number + (number > 0) : number + 2]
                with self._named(manifest.version, deadline):
                    async with deadline.timeout():
                        await self._bucket(peer, manifest, bucket, ahead)
                yield
            finished = True
        finally:
            if not finished:  # answers to what was asked for ahead may still be on their way
                self._hang_up()

    async def _bucket(self, peer: socket.socket, manifest: Manifest, bucket: Bucket, ahead: Sequence[Bucket]) -> None:
        """Ask for some, and receive one that was asked for."""
        for wanted in ahead:
            request = _REQUEST.pack(manifest.sync_id, wanted.start, wanted.memory.nbytes)
            await asyncio.get_running_loop().sock_sendall(peer, request)
        if await _receive_bytes(peer, 1) != b"\x01":
            raise WeightSyncError(
                f"Version {manifest.version} is not there any more: the sender took it back or went on to a later version. "
                "A new sync is needed."
            )
        receiving = self._receiving(peer, bucket.memory)
        try:
            await receiving.done()
        finally:
            await receiving.end()

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
        """The connection of the last sync, or a new one when the sender has closed it."""
        if self._connection is not None and _usable(self._connection):
            return self._connection
        self._hang_up()
        family = socket.AF_INET6 if ":" in sender.host else socket.AF_INET
        self._connection = peer = socket.socket(family, socket.SOCK_STREAM)
        peer.setblocking(False)
        _prepare(peer)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(peer, (sender.host, sender.port))
        greeting = await _receive_bytes(peer, len(MAGIC) + NONCE_BYTES)
        if not greeting.startswith(MAGIC):
            raise WeightSyncError(
                f"{sender.host}:{sender.port} is no sender of weights: it greets with {greeting[:4]!r}."
            )
        nonces = greeting[len(MAGIC) :] + (mine := os.urandom(NONCE_BYTES))
        await loop.sock_sendall(peer, mine + self._key.proof(b"receiver", nonces, sender.token))
        verdict = await _receive_bytes(peer, 1 + PROOF_BYTES)
        if not hmac.compare_digest(verdict, b"\x01" + self._key.proof(b"sender:::", nonces, sender.token)):
            raise WeightSyncError(
                f"The sender at {sender.host}:{sender.port} has another key than this process, or is another process: {HOW_TO_SET}."
            )
        return peer

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Courier(Protocol):
    """Brings the bytes of published memory to the receiver at the other end of one connection; used by the thread of that connection."""

    def deliver(self, peer: socket.socket, fd: int, offset: int, size: int) -> None:
        """Send `size` bytes of the file, from `offset` on.

        Raises:
            OSError: the connection broke, or has to end.
        """
        ...

    def close(self) -> None:
        """The connection has ended."""
        ...


class FileCourier:
    """The bytes themselves."""

    def deliver(self, peer: socket.socket, fd: int, offset: int, size: int) -> None:
        """See Courier.deliver."""
        end = offset + size
        while offset < end:
            sent = os.sendfile(peer.fileno(), fd, offset, end - offset)
            if not sent:
                raise ConnectionResetError("the memory ended")
            offset += sent

    def close(self) -> None:
        """There is nothing to give back."""


class Server:
    """Threads that write published memory to receivers; they read files alone and never touch the trainer's tensors.

    Args:
        open_sync: sync_id -> file descriptor of its memory, the caller's to close, or None.
        new_courier: for each connection, to bring the bytes.
    """

    def __init__(
        self,
        host: str,
        key: Secret,
        token: bytes,
        open_sync: Callable[[bytes], int | None],
        new_courier: Callable[[], Courier],
    ) -> None:
        self._key = key
        self._token = token
        self._open_sync = open_sync
        self._new_courier = new_courier
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._peers: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="rl-ckpt-tcp", daemon=True).start()

    def close(self) -> None:
        """End all connections; safe to call twice."""
        with self._lock:
            self._closed = True
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
            except OSError:  # closed
                return
            with self._lock:
                if self._closed:
                    peer.close()
                    return
                self._peers.add(peer)
            threading.Thread(target=self._serve, args=(peer,), name="rl-ckpt-tcp-peer", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            with peer, contextlib.closing(self._new_courier()) as courier:
                _prepare(peer)
                peer.settimeout(HANDSHAKE_S)
                if self._shake_hands(peer):
                    peer.settimeout(None)
                    while self._answer(peer, courier):
                        pass
        except OSError as error:  # the receiver left, which is its right
            _log.debug("A receiver's connection ended: %s.", error)
        finally:
            with self._lock:
                self._peers.discard(peer)

    def _shake_hands(self, peer: socket.socket) -> bool:
        mine = os.urandom(NONCE_BYTES)
        peer.sendall(MAGIC + mine)
        said = _read_exactly(peer, NONCE_BYTES + PROOF_BYTES)
        nonces = mine + said[:NONCE_BYTES]
        if not hmac.compare_digest(said[NONCE_BYTES:], self._key.proof(b"receiver", nonces, self._token)):
            _log.warning("A receiver was refused: it does not know the key, or meant another process.")
            peer.sendall(bytes(1 + PROOF_BYTES))
            return False
        peer.sendall(b"\x01" + self._key.proof(b"sender:::", nonces, self._token))
        return True

    def _answer(self, peer: socket.socket, courier: Courier) -> bool:
        request = _read_exactly(peer, _REQUEST.size)
        if not request:
            return False
        sync_id, offset, size = _REQUEST.unpack(request)
        fd = self._open_sync(sync_id)
        if fd is None:
            peer.sendall(b"\x00")
            return False
        try:
            if PAYLOAD_START + offset + size > os.fstat(fd).st_size:
                peer.sendall(b"\x00")
                return False
            peer.sendall(b"\x01")
            courier.deliver(peer, fd, PAYLOAD_START + offset, size)
        finally:
            os.close(fd)
        return True


def _read_exactly(peer: socket.socket, count: int) -> bytes:
    """So many bytes, or none at the end of the stream."""
    data = b""
    while len(data) < count:
        more = peer.recv(count - len(data))
        if not more:
            return b""
        data += more
    return data


class Receiving:
    """A bucket on its way into memory. The thread that fills it moves bytes alone, and is over before the memory is used for anything else.

    Made and awaited in an event loop.
    """

    def __init__(self, peer: socket.socket, target: memoryview) -> None:
        self._peer = peer
        self._work = asyncio.get_running_loop().run_in_executor(None, self.fill, target)

    def fill(self, target: memoryview) -> None:
        """In the thread: take bytes from the connection until the target is full."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._peer, selectors.EVENT_READ)
            while target:
                try:
                    got = self._peer.recv_into(target[:_RECV_BYTES])
                except BlockingIOError:
                    selector.select()
                    continue
                if not got:
                    raise ConnectionResetError("closed by the sender")
                target = target[got:]

    async def done(self) -> None:
        """The bucket is there.

        Raises:
            OSError: the connection broke.
        """
        await asyncio.shield(self._work)

    async def end(self) -> None:
        """Nothing is written any more; a bucket that is not there yet breaks the connection."""
        if not self._work.done():
            with contextlib.suppress(OSError):  # it is broken already
                self._peer.shutdown(socket.SHUT_RDWR)
            await asyncio.wait({self._work})
            self._work.exception()


async def _receive(peer: socket.socket, target: memoryview) -> None:
    loop = asyncio.get_running_loop()
    while target:
        got = await loop.sock_recv_into(peer, target[:_RECV_BYTES])
        if not got:
            raise ConnectionResetError("closed by the sender")
        target = target[got:]


async def _receive_bytes(peer: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    await _receive(peer, memoryview(data))
    return bytes(data)


def _usable(peer: socket.socket) -> bool:
    """Whether nothing has been said since the last answer: neither the end of the stream nor anything else."""
    try:
        peer.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _prepare(peer: socket.socket) -> None:
    """Small messages leave at once; a peer whose host is gone is noticed."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, DEAD_AFTER_S - 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)


def _listen_address(listen: str, key: Secret) -> str:
    try:
        address = ipaddress.ip_address(listen)
    except ValueError:
        raise ConfigError(f"checkpoint_engine.listen must be an IP address of this host; got {listen!r}.") from None
    if address.is_unspecified:
        raise ConfigError(f"checkpoint_engine.listen must name one address that receivers can reach; got {listen!r}.")
    if not address.is_loopback and not key:
        raise ConfigError(f"checkpoint_engine.listen={listen} lets other hosts in, which needs a key: {HOW_TO_SET}.")
    return listen


def read_member(metadata: bytes, engine: str) -> TcpMember:
    """A member's metadata.

    Raises:
        WeightSyncError: they are of no engine that talks over TCP.
    """
    return decode_struct(_decoder, metadata, f"metadata of an engine {engine!r}")
