"""Engines `gloo` and `nccl`: the sender broadcasts the weights, bucket by bucket, in a torch.distributed group of its own.

Sender and receivers form one group per set of members, beside the default group of the process, and keep it between syncs. The next bucket is
under way while receivers verify the last one. A group is as alive as its weakest member: when one dies or is late, all fail within the
deadline, and the manager forms a new group without it.

Gloo and the store that the members meet at know no keys, so both stay on loopback.
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
from rl_ckpt_engine.digests import digest_of
from rl_ckpt_engine.engine import Capabilities, GroupEngine, Topology
from rl_ckpt_engine.engines.copying import CopyingEngine
from rl_ckpt_engine.engines.memfd import PAYLOAD_START, Slot
from rl_ckpt_engine.ledger import Published
from rl_ckpt_engine.manifest import DIGEST_BYTES, Manifest, WeightKind, decode_struct
from rl_ckpt_engine.staging import Bucket, cut
from rl_ckpt_engine.stream import Deadline
from rl_protocol.errors import ConfigError, WeightSyncError
from rl_protocol.weights import WeightTensor

LOOPBACK = "127.0.0.1"
_ABORT_S = 5.0
T = TypeVar("T")


class GroupMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Metadata of one member."""

    port: int
    """At which this member would keep the store; the sender does."""
    token: bytes
    """Random name, a new one for each group."""


class GroupPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A member's place in a group."""

    group: bytes
    rank: int
    """0 is the sender."""
    size: int
    port: int
    """Of the sender's store."""


_member_decoder = msgspec.msgpack.Decoder(GroupMember)
_place_decoder = msgspec.msgpack.Decoder(GroupPlace)


class TorchGroupEngine(CopyingEngine[Slot], GroupEngine):
    """See the module's docstring; what depends on the device is in the engines below."""

    def __init__(self, config: CheckpointEngineConfig | None = None) -> None:
        super().__init__(config)
        self._listener: socket.socket | None = None
        self._port = 0
        self._token = secrets.token_bytes(DIGEST_BYTES)
        self._place: GroupPlace | None = None
        self._store: dist.TCPStore | None = None
        self._group: Any = None

    # ------------------------------------------------------------------------------------------------------------ to implement

    @abstractmethod
    def _form(self, store: dist.Store, place: GroupPlace, timeout: timedelta) -> Any:
        """A process group of the device's kind; blocks until all members are there."""

    @abstractmethod
    def _start(self, memory: torch.Tensor) -> Transfer:
        """Begin to broadcast host memory, uint8 [n], from rank 0 into the same memory of the others."""

    # ------------------------------------------------------------------------------------------------------------ group

    def prepare(self) -> bytes:
        """See CheckpointEngine.prepare; a new group needs new metadata."""
        if self._port == 0:
            self._listener = socket.create_server((LOOPBACK, 0))
            self._port = int(self._listener.getsockname()[1])
        return msgspec.msgpack.encode(GroupMember(port=self._port, token=self._token))

    @classmethod
    def build_topology(cls, sender_metadata: bytes, receiver_metadatas: Sequence[bytes]) -> Topology:
        """See CheckpointEngine.build_topology."""
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
        """See CheckpointEngine.init_process_group; `join` does the work."""
        place = decode_struct(_place_decoder, member, "place in a group")
        self.leave()
        self._place = place
        self._token = secrets.token_bytes(DIGEST_BYTES)

    async def join(self, *, timeout_s: float) -> None:
        """See GroupEngine.join."""
        if self._place is None:
            raise WeightSyncError("There is no group to join; call init_process_group.")
        with _named(f"Joining the group of {self._place.size} as rank {self._place.rank}"):
            place, timeout = self._place, timedelta(seconds=timeout_s)
            self._group = await _beside(lambda: self._meet(place, timeout), timeout_s)

    def _meet(self, place: GroupPlace, timeout: timedelta) -> Any:
        if place.rank == 0 and self._store is None:
            assert self._listener is not None, "prepare came first"
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
        return b""  # a version may be moved in several groups

    def _check_joined(self, manifest: Manifest) -> None:
        del manifest
        if self._group is None:
            raise WeightSyncError("This member is in no group, or its group broke; a new one must be formed.")

    async def republish(self, *, timeout_s: float) -> Manifest:
        """Not here: a late joiner forms a group with the sender."""
        del timeout_s
        raise WeightSyncError(f"Engine {self.name!r} serves late joiners from the sender alone.")

    # ------------------------------------------------------------------------------------------------------------ moving

    def _new_place(self) -> Slot:
        return Slot()

    async def serve(self, manifest: Manifest, *, timeout_s: float) -> None:
        """See GroupEngine.serve."""
        self._check_joined(manifest)
        published = self._published(manifest)
        if published is None:
            self.leave()
            raise WeightSyncError(f"Version {manifest.version} is not there any more; a new sync is needed.")
        deadline = Deadline(timeout_s, f"Serving version {manifest.version}", f"engine {self.name}")
        if manifest.payload_nbytes == 0:
            return
        mapped = mmap.mmap(published.held.fd, PAYLOAD_START + manifest.payload_nbytes)
        memory = np.frombuffer(mapped, np.uint8, offset=PAYLOAD_START)
        async for _ in self._broadcast(list(cut(manifest.tensors, memory, self._config.bucket_bytes)), deadline):
            pass

    async def offer(
        self, weights: Iterable[WeightTensor], version: int, *, timeout_s: float, kind: WeightKind = "full"
    ) -> Manifest:
        """See GroupEngine.offer; costs one copy of the weights for that time."""
        self._close_outlet()
        self._outlet = outlet = self._new_outlet()
        manifest = await outlet.send_weights(weights, version, timeout_s=timeout_s, kind=kind)
        outlet.finalize(version)
        return manifest

    def finalize(self, version: int) -> None:
        """See CheckpointEngine.finalize."""
        super().finalize(version)
        self._close_outlet()

    def _published(self, manifest: Manifest) -> Published[Slot] | None:
        found = self._ledger.find(manifest.sync_id)
        if found is None and isinstance(self._outlet, TorchGroupEngine):
            return self._outlet._ledger.find(manifest.sync_id)
        return found

    def _pull(self, manifest: Manifest, buckets: Sequence[Bucket], deadline: Deadline) -> AsyncGenerator[None]:
        del manifest
        return self._broadcast(buckets, deadline)

    async def _fetch(self, manifest: Manifest, deadline: Deadline) -> Any:
        self._staging.forget()  # every member takes part in every bucket
        return await super()._fetch(manifest, deadline)

    async def _broadcast(self, buckets: Sequence[Bucket], deadline: Deadline) -> AsyncGenerator[None]:
        """Move the buckets; yields after each, with the next one under way."""
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
                self._staging.clear()  # what is still under way may write into that memory
                self.leave()

    def leave(self) -> None:
        """See GroupEngine.leave; a group in which something failed is not used again."""
        group, self._group = self._group, None
        if group is not None:
            ending = threading.Thread(target=_abort, args=(group,), name="rl-ckpt-abort", daemon=True)
            ending.start()
            ending.join(_ABORT_S)

    def close(self) -> None:
        """See CheckpointEngine.close."""
        self.leave()
        super().close()
        self._store = None
        self._place = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None


class Transfer:
    """A broadcast under way.

    Args:
        work: of torch.distributed.
        land: called after it, to bring the bytes where they belong.
    """

    def __init__(self, work: Any, land: Any = None) -> None:
        self._work = work
        self._land = land

    def wait(self, timeout: timedelta) -> None:
        """Until the bytes are there: not merely enqueued, on a device."""
        self._work.wait(timeout)
        if self._land is not None:
            self._land()


class GlooEngine(TorchGroupEngine):
    """Broadcast between processes of one host, straight from and into host memory."""

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
    """Broadcast between GPUs of one host through device buckets; host memory at both ends, as WeightTensor has it.

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
            raise ConfigError("Engine 'nccl' needs a GPU and a torch with NCCL; set checkpoint_engine.backend to gloo.")
        super().__init__(config)
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._buckets = [torch.empty(0, dtype=torch.uint8, device=self._device) for _ in range(2)]

    def _form(self, store: dist.Store, place: GroupPlace, timeout: timedelta) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout  # pyright: ignore[reportPrivateUsage]
        torch.cuda.set_device(self._device)
        return dist.ProcessGroupNCCL(store, place.rank, place.size, options)

    def _start(self, memory: torch.Tensor) -> Transfer:
        assert self._place is not None, "a group was joined"
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
    """torch.distributed reports everything as RuntimeError."""
    try:
        yield
    except TimeoutError as error:
        raise WeightSyncError(f"{what} did not finish in time: a member is missing or hangs.") from error
    except (RuntimeError, ValueError) as error:
        raise WeightSyncError(f"{what} failed: {str(error).splitlines()[0]}. A member died, or was late.") from error


async def _beside(call: Callable[[], T], timeout_s: float) -> T:
    """Run a blocking call of torch in a thread. One that outlives the deadline is left behind: torch does not keep every time limit.

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
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
            loop.call_soon_threadsafe(land, result, failed)

    threading.Thread(target=run, name="rl-ckpt-group", daemon=True).start()
    async with asyncio.timeout(timeout_s):
        return await future


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()


def _member(metadata: bytes) -> GroupMember:
    return decode_struct(_member_decoder, metadata, "metadata of a member of a group")
