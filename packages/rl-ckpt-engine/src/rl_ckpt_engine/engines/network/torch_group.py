"""Engines `gloo` and `nccl`: broadcast buckets in a separate torch.distributed process group.

Sender and receivers form a group besides the default group of the process and keep it while its
members stay the same. The next bucket is broadcast while receivers verify the last one. If a member
dies or is late, all members fail within the deadline, and the manager forms a new group without it.

Gloo and the TCP store have no authentication, so both are restricted to loopback.
"""
# torch documents the stores of torch.distributed but does not list them in __all__.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import asyncio
import contextlib
import mmap
import secrets
import socket
import threading
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.engines.base.memfd import PAYLOAD_START, Slot
from rl_ckpt_engine.engines.base.publishing_engine import PublishingEngine
from rl_ckpt_engine.engines.base.receive_buffer import Bucket, split_into_buckets
from rl_ckpt_engine.engines.base.sent_versions import Published
from rl_ckpt_engine.engines.contract import Capabilities, Topology
from rl_ckpt_engine.payload.block_stream import Deadline
from rl_ckpt_engine.payload.digests import digest_of
from rl_ckpt_engine.payload.manifest import DIGEST_BYTES, Manifest, WeightKind, decode_struct
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import ConfigError, WeightSyncError

LOOPBACK = "127.0.0.1"
_ABORT_S = 5.0
T = TypeVar("T")


class GroupMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Metadata of one member."""

    port: int
    """Port of the store; only the sender's is used."""
    token: bytes
    """Random id, new for each group."""


class GroupPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rank and size of a member's group."""

    group: bytes
    rank: int
    """0 is the sender."""
    size: int
    port: int
    """Port of the sender's store."""


_member_decoder = msgspec.msgpack.Decoder(GroupMember)
_place_decoder = msgspec.msgpack.Decoder(GroupPlace)


class TorchGroupEngine(PublishingEngine[Slot]):
    """Broadcasts in a process group; subclasses implement the device-dependent parts."""

    def __init__(self, config: CheckpointEngineConfig | None = None) -> None:
        super().__init__(config)
        self._listener: socket.socket | None = None
        self._port = 0
        self._token = secrets.token_bytes(DIGEST_BYTES)
        self._place: GroupPlace | None = None
        self._store: dist.TCPStore | None = None
        self._group: Any = None

    # ---- to implement

    @abstractmethod
    def _form(self, store: dist.Store, place: GroupPlace, timeout: timedelta) -> Any:
        """Create the process group; blocks until all members have joined."""

    @abstractmethod
    def _start(self, memory: torch.Tensor) -> Transfer:
        """Start to broadcast host memory, uint8 [n], from rank 0 to the other ranks."""

    # ---- group

    def prepare(self) -> bytes:
        """This member's metadata; they change after each `init_process_group`."""
        if self._port == 0:
            self._listener = socket.create_server((LOOPBACK, 0))
            self._port = int(self._listener.getsockname()[1])
        return msgspec.msgpack.encode(GroupMember(port=self._port, token=self._token))

    @classmethod
    def build_topology(cls, sender_metadata: bytes, receiver_metadatas: Sequence[bytes]) -> Topology:
        members = [_member(metadata) for metadata in (sender_metadata, *receiver_metadatas)]
        group, size = digest_of(b"".join(member.token for member in members)), len(members)
        places = [
            msgspec.msgpack.encode(GroupPlace(group=group, rank=rank, size=size, port=members[0].port))
            for rank in range(size)
        ]
        return Topology(sender=places[0], receivers=tuple(places[1:]))

    @classmethod
    def _check_members(cls, sender: bytes, receivers: Sequence[bytes]) -> None:
        del receivers
        decode_struct(_place_decoder, sender, "place in a group")

    def init_process_group(self, member: bytes) -> None:
        """Leave the current group and set the next one, which `join` forms."""
        place = decode_struct(_place_decoder, member, "place in a group")
        self.leave()
        self._place = place
        self._token = secrets.token_bytes(DIGEST_BYTES)

    async def join(self, *, timeout_s: float) -> None:
        if self._place is None:
            raise WeightSyncError("There is no group to join; call init_process_group first.")
        with _named(f"Joining the group of {self._place.size} as rank {self._place.rank}"):
            place, timeout = self._place, timedelta(seconds=timeout_s)
            self._group = await _beside(lambda: self._meet(place, timeout), timeout_s)

    def _meet(self, place: GroupPlace, timeout: timedelta) -> Any:
        if place.rank == 0 and self._store is None:
            assert self._listener is not None, "prepare was called"
            self._store = dist.TCPStore(
                LOOPBACK,
                place.port,
                None,
                True,
                timeout,
                wait_for_workers=False,
                master_listen_fd=self._listener.detach(),
            )
        store = self._store
        if place.rank != 0 or store is None:
            store = dist.TCPStore(LOOPBACK, place.port, None, False, timeout, wait_for_workers=False)
        return self._form(dist.PrefixStore(place.group.hex(), store), place, timeout)

    def _identity(self) -> bytes:
        return b""  # a version may be broadcast in several groups

    def _check_joined(self, manifest: Manifest) -> None:
        del manifest
        if self._group is None:
            raise WeightSyncError("This member has no group, or its group failed; a new one must be formed.")

    # ---- moving

    def _new_store(self) -> Slot:
        return Slot()

    async def serve(self, manifest: Manifest, *, timeout_s: float) -> None:
        self._check_joined(manifest)
        published = self._published(manifest)
        if published is None:
            self.leave()
            raise WeightSyncError(f"Version {manifest.version} is no longer available; a new sync is needed.")
        deadline = Deadline(timeout_s, f"Serving version {manifest.version}", f"engine {self.name}")
        if manifest.payload_nbytes == 0:
            return
        mapped = mmap.mmap(published.held.fd, PAYLOAD_START + manifest.payload_nbytes)
        memory = np.frombuffer(mapped, np.uint8, offset=PAYLOAD_START)
        async for _ in self._broadcast(
            list(split_into_buckets(manifest.tensors, memory, self._config.bucket_bytes)), deadline
        ):
            pass

    async def offer(
        self, weights: Iterable[WeightTensor], version: int, *, timeout_s: float, kind: WeightKind = "full"
    ) -> Manifest:
        """Publish a copy of the weights again; it is kept until a later version is finalized."""
        self._close_republisher()
        self._republisher = republisher = self._new_republisher()
        manifest = await republisher.send_weights(weights, version, timeout_s=timeout_s, kind=kind)
        republisher.finalize(version)
        return manifest

    def finalize(self, version: int) -> None:
        super().finalize(version)
        self._close_republisher()

    def _published(self, manifest: Manifest) -> Published[Slot] | None:
        found = self._versions.find(manifest.sync_id)
        if found is None and isinstance(self._republisher, TorchGroupEngine):
            return self._republisher._versions.find(manifest.sync_id)
        return found

    def _pull(self, manifest: Manifest, buckets: Sequence[Bucket], deadline: Deadline) -> AsyncGenerator[None]:
        del manifest
        return self._broadcast(buckets, deadline)

    async def _fetch(self, manifest: Manifest, deadline: Deadline) -> Any:
        self._buffer.forget()  # every member receives every bucket
        return await super()._fetch(manifest, deadline)

    async def _broadcast(self, buckets: Sequence[Bucket], deadline: Deadline) -> AsyncGenerator[None]:
        """Broadcast the buckets; yields after each while the next one is running."""
        running: Transfer | None = None
        finished = False
        try:
            with _named("Broadcasting"):
                for bucket in [*buckets, None]:
                    ahead = None if bucket is None else self._start(torch.frombuffer(bucket.memory, dtype=torch.uint8))
                    if running is not None:
                        await _beside(partial(running.wait, timedelta(seconds=deadline.left_s)), deadline.left_s)
                        yield
                    running = ahead
            finished = True
        finally:
            if not finished:
                self._buffer.clear()  # a running broadcast may still write into that memory
                self.leave()

    def leave(self) -> None:
        """Abort the group; a group that failed is never reused."""
        group, self._group = self._group, None
        if group is not None:
            ending = threading.Thread(target=_abort, args=(group,), name="rl-ckpt-abort", daemon=True)
            ending.start()
            ending.join(_ABORT_S)

    def close(self) -> None:
        self.leave()
        super().close()
        self._store = None
        self._place = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None


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


class GlooEngine(TorchGroupEngine):
    """Broadcasts between processes of one host, directly between host memory."""

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "gloo"
    capabilities: ClassVar[Capabilities] = Capabilities(
        same_host_only=True, zero_copy=False, elastic=False, devices=("cpu",)
    )

    def _form(self, store: dist.Store, place: GroupPlace, timeout: timedelta) -> Any:
        gloo = cast("Any", dist.ProcessGroupGloo)  # torch has no public way to choose the interface of one group
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = timeout
        return gloo(store, place.rank, place.size, options)

    def _start(self, memory: torch.Tensor) -> Transfer:
        return Transfer(self._group.broadcast(memory, 0))


class NcclEngine(TorchGroupEngine):
    """Broadcasts between GPUs of one host through device buckets; source and destination are host
    memory.

    Raises:
        ConfigError: there is no GPU, or torch was built without NCCL.
    """

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "nccl"
    capabilities: ClassVar[Capabilities] = Capabilities(
        same_host_only=True, zero_copy=False, elastic=False, devices=("cuda",)
    )

    def __init__(self, config: CheckpointEngineConfig | None = None) -> None:
        if not (torch.cuda.is_available() and dist.is_nccl_available()):
            raise ConfigError(
                "Engine 'nccl' needs a GPU and a torch with NCCL; set CheckpointEngineConfig.backend to gloo."
            )
        super().__init__(config)
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._buckets = [torch.empty(0, dtype=torch.uint8, device=self._device) for _ in range(2)]

    def _form(self, store: dist.Store, place: GroupPlace, timeout: timedelta) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout  # pyright: ignore[reportPrivateUsage]
        torch.cuda.set_device(self._device)
        return dist.ProcessGroupNCCL(store, place.rank, place.size, options)

    def _start(self, memory: torch.Tensor) -> Transfer:
        assert self._place is not None, "the group was joined"
        torch.cuda.set_device(self._device)
        self._buckets.reverse()
        if self._buckets[0].nbytes < memory.nbytes:
            self._buckets[0] = torch.empty(memory.nbytes, dtype=torch.uint8, device=self._device)
        bucket = self._buckets[0][: memory.nbytes]
        if self._place.rank == 0:
            bucket.copy_(memory)
        work = self._group.broadcast(bucket, 0)
        is_sender = self._place.rank == 0

        def land() -> None:
            torch.cuda.synchronize(self._device)  # work.wait returns when the broadcast is enqueued
            if not is_sender:
                memory.copy_(bucket)

        return Transfer(work, land)


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
    future: asyncio.Future[T] = loop.create_future()

    def land(result: T | None, error: Exception | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(cast("T", result))

    def run() -> None:
        result, failed = None, None
        try:
            result = call()
        except (RuntimeError, ValueError) as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(land, result, failed)

    threading.Thread(target=run, name="rl-ckpt-group", daemon=True).start()
    async with asyncio.timeout(timeout_s):
        return await future


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()


def _member(metadata: bytes) -> GroupMember:
    return decode_struct(_member_decoder, metadata, "metadata of a member of a group")
