"""A torch.distributed process group that broadcasts buckets of host memory from its first member.

It exists besides the default group of the process, is kept while its members stay the same, and is
never reused after a failure. Gloo, NCCL and the TCP store have no authentication: they listen only
on the interface of the sender's address, or of the way to it, and keys of the store begin with a
digest of random numbers of the members.
"""
# torch documents the stores of torch.distributed but does not list them in __all__.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import secrets
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist

from rl_ckpt_engine.engines.base.receive_buffer import Bucket
from rl_ckpt_engine.engines.contract import Topology
from rl_ckpt_engine.payload.block_stream import Deadline
from rl_ckpt_engine.payload.digests import digest_of
from rl_ckpt_engine.payload.manifest import DIGEST_BYTES, decode_struct
from rl_protocol.errors import ConfigError, WeightSyncError
from rl_protocol.support.network_interface import NetworkInterface, find_interface, interface_towards

_ABORT_S = 5.0
_ending: set[threading.Thread] = set()
"""Threads that destroy groups which were left."""
T = TypeVar("T")


class GroupMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Metadata of one member."""

    host: str
    port: int
    """Address of the store; only the sender's is used. Port 0: `host` is another host's address."""
    token: bytes
    """Random id, new for each group."""


class GroupPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rank and size of a member's group."""

    group: bytes
    rank: int
    """0 is the sender."""
    size: int
    host: str
    port: int
    """Address of the sender's store."""


_member_decoder = msgspec.msgpack.Decoder(GroupMember)
_place_decoder = msgspec.msgpack.Decoder(GroupPlace)


class Transfer:
    """A running broadcast.

    Args:
        work: its handle in torch.distributed.
        land: called after it to copy the bytes to their destination.
    """

    def __init__(self, work: Any, land: Any = None) -> None:
        self._work = work
        self._land = land

    def wait(self, timeout: timedelta) -> None:
        """Wait until the bytes have arrived, not only until the broadcast is enqueued on a
        device."""
        self._work.wait(timeout)
        if self._land is not None:
            self._land()


class Collective(Protocol):
    """The part of a group that depends on the device."""

    def form(self, store: dist.Store, place: GroupPlace, interface: NetworkInterface, timeout: timedelta) -> Any:
        """Create the process group; blocks until all members have joined.

        Args:
            store: keys and values that the members share.
            place: of this member.
            interface: through which the members reach this one.
            timeout: longest wait.
        """
        ...

    def start(self, group: Any, rank: int, memory: torch.Tensor) -> Transfer:
        """Start to broadcast host memory, uint8 [n], from rank 0 to the other ranks."""
        ...


class ProcessGroup:
    """This process's membership in one group after another.

    Args:
        listen: address at which the sender's store listens.
        collective: how members of the group broadcast.
        abandoned: called when a broadcast ends early: it may still write into its memory.
    """

    def __init__(self, listen: str, collective: Collective, abandoned: Callable[[], None]) -> None:
        self._listen = listen
        self._collective = collective
        self._abandoned = abandoned
        self._listener: socket.socket | None = None
        self._port = 0
        self._token = secrets.token_bytes(DIGEST_BYTES)
        self._place: GroupPlace | None = None
        self._store: dist.TCPStore | None = None
        self._group: Any = None

    def member(self) -> bytes:
        """This member's metadata; they change after each `place`.

        Raises:
            WeightSyncError: it can't listen there.
        """
        if self._port == 0:
            try:
                self._listener = socket.create_server((self._listen, 0))
                self._port = int(self._listener.getsockname()[1])
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise WeightSyncError(f"A group can't listen at {self._listen}: {error}.") from error
        return msgspec.msgpack.encode(GroupMember(host=self._listen, port=self._port, token=self._token))

    def place(self, member: bytes) -> None:
        """Leave the current group and set the next one, which `join` forms."""
        place = decode_struct(_place_decoder, member, "place in a group")
        self.leave()
        self._place = place
        self._token = secrets.token_bytes(DIGEST_BYTES)

    async def join(self, timeout_s: float) -> None:
        """Form the group; returns when all members have joined.

        Raises:
            WeightSyncError: there is no place, or a member did not join.
        """
        if self._place is None:
            raise WeightSyncError("There is no group to join; call init_process_group first.")
        with _named(f"Joining the group of {self._place.size} as rank {self._place.rank}"):
            place, timeout = self._place, timedelta(seconds=timeout_s)
            interface = _interface_of(place)
            self._group = await _beside(lambda: self._meet(place, interface, timeout), timeout_s)

    def _meet(self, place: GroupPlace, interface: NetworkInterface, timeout: timedelta) -> Any:
        if place.rank == 0 and self._store is None:
            assert self._listener is not None, "member() was called"
            self._store = dist.TCPStore(
                place.host,
                place.port,
                None,
                True,
                timeout,
                wait_for_workers=False,
                master_listen_fd=self._listener.detach(),
            )
        store = self._store
        if place.rank != 0 or store is None:
            store = dist.TCPStore(place.host, place.port, None, False, timeout, wait_for_workers=False)
        return self._collective.form(dist.PrefixStore(place.group.hex(), store), place, interface, timeout)

    def require(self) -> None:
        """Check that this process is a member of a group.

        Raises:
            WeightSyncError: it is not.
        """
        if self._group is None:
            raise WeightSyncError(
                "This member has no process group, or its group failed. The manager forms groups if it has the engine's class: "
                "CheckpointEngineManager(sender, receivers, config, registry.resolve(config))."
            )

    async def broadcast(self, buckets: Sequence[Bucket], deadline: Deadline) -> AsyncGenerator[None]:
        """Broadcast the buckets; yields after each while the next one is running.

        Raises:
            WeightSyncError: a member died or was late. This process has left the group.
        """
        running: Transfer | None = None
        finished = False
        try:
            with _named("Broadcasting"):
                for bucket in [*buckets, None]:
                    ahead = None if bucket is None else self._start(bucket)
                    if running is not None:
                        await _beside(partial(running.wait, timedelta(seconds=deadline.left_s)), deadline.left_s)
                        yield
                    running = ahead
            finished = True
        finally:
            if not finished:
                self._abandoned()
                self.leave()

    def _start(self, bucket: Bucket) -> Transfer:
        assert self._place is not None, "the group was joined"
        return self._collective.start(self._group, self._place.rank, torch.frombuffer(bucket.memory, dtype=torch.uint8))

    def leave(self) -> None:
        """Abort the group; a group that failed is never reused.

        The destructor of a gloo group waits for a broadcast that begins during the abort, until the
        timeout of the group. So the last reference is that of a thread for which only the end of
        the process waits, and not for long.
        """
        if self._group is not None:
            aborted = threading.Event()
            ending = threading.Thread(target=_abort, args=(self._group, aborted), name="rl-ckpt-abort", daemon=True)
            self._group = None
            _ending.difference_update([thread for thread in _ending if not thread.is_alive()])
            _ending.add(ending)
            ending.start()
            aborted.wait(_ABORT_S)

    def close(self) -> None:
        """Leave the group and stop listening; safe to call twice."""
        self.leave()
        self._store = None
        self._place = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def places_of(sender: bytes, receivers: Sequence[bytes]) -> Topology:
    """The place of each member in the group of these members.

    Raises:
        WeightSyncError: metadata can't be decoded, or the sender can't listen.
    """
    members = [
        decode_struct(_member_decoder, metadata, "metadata of a member of a group") for metadata in (sender, *receivers)
    ]
    first = members[0]
    if first.port == 0:
        raise WeightSyncError(
            f"The sender of a group can't listen at {first.host}, which is not an address of its host: set CheckpointEngineConfig.listen."
        )
    group, size = digest_of(b"".join(member.token for member in members)), len(members)
    places = [
        msgspec.msgpack.encode(GroupPlace(group=group, rank=rank, size=size, host=first.host, port=first.port))
        for rank in range(size)
    ]
    return Topology(sender=places[0], receivers=tuple(places[1:]))


def _interface_of(place: GroupPlace) -> NetworkInterface:
    """The interface of the sender's address, or that through which a receiver reaches it.

    Raises:
        WeightSyncError: there is none.
    """
    try:
        return find_interface(place.host) if place.rank == 0 else interface_towards(place.host)
    except ConfigError as error:
        raise WeightSyncError(f"Joining a group failed: {error}") from error


@contextlib.contextmanager
def _named(what: str) -> Generator[None]:
    """Turn errors of torch.distributed, which are all RuntimeError, into WeightSyncError."""
    try:
        yield
    except TimeoutError as error:
        raise WeightSyncError(f"{what} did not finish in time: a member is missing or stuck.") from error
    except (RuntimeError, ValueError) as error:
        raise WeightSyncError(f"{what} failed: {str(error).splitlines()[0]}. A member died, or was late.") from error


async def _beside(call: Callable[[], T], timeout_s: float) -> T:
    """Run a blocking call of torch in a thread, and abandon it at the deadline, which torch does
    not always respect.

    Raises:
        TimeoutError: the deadline passed.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    results: list[T] = []  # taken out below: a thread that destroys a group at the end of the process aborts it

    def land(error: Exception | None) -> None:
        if not done.done():
            done.set_exception(error) if error is not None else done.set_result(None)

    def run() -> None:
        failed = None
        try:
            results.append(call())
        except (RuntimeError, ValueError) as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(land, failed)

    threading.Thread(target=run, name="rl-ckpt-group", daemon=True).start()
    async with asyncio.timeout(timeout_s):
        await done
    return results.pop()


def _abort(group: Any, aborted: threading.Event) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()
    aborted.set()


@atexit.register
def _await_ends() -> None:
    """The interpreter would stop these threads within C++, which aborts the process."""
    until = time.monotonic() + _ABORT_S
    for thread in tuple(_ending):
        thread.join(max(0.0, until - time.monotonic()))
