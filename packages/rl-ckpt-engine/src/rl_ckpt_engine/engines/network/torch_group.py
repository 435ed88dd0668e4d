"""Engines `gloo` and `nccl`: broadcast buckets in a separate torch.distributed process group.

Sender and receivers keep the group while its members stay the same. The next bucket is broadcast
while receivers verify the last one. If a member dies or is late, all members fail within the
deadline, and the manager forms a new group without it.

Beyond loopback (CheckpointEngineConfig.listen) any process that reaches the interface could join a
group or send bytes to it, so the operator must declare the network as trusted. Digests detect
damage, not forgery.
"""
# torch documents the stores of torch.distributed but does not list them in __all__.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar, Self, cast

import torch
import torch.distributed as dist

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.engines.base.memfd import Slot
from rl_ckpt_engine.engines.base.receive_buffer import (
    ReceiveBuffers,
    receiving,
    require_received,
    split_into_buckets,
)
from rl_ckpt_engine.engines.base.sent_versions import Published
from rl_ckpt_engine.engines.base.version_sender import VersionSender
from rl_ckpt_engine.engines.contract import Capabilities, CheckpointEngine, Topology
from rl_ckpt_engine.engines.network.listen_address import TRUSTED, listen_address, network_is_trusted
from rl_ckpt_engine.engines.network.process_group import (
    Collective,
    GroupPlace,
    ProcessGroup,
    Transfer,
    places_of,
)
from rl_ckpt_engine.payload.block_stream import Deadline
from rl_ckpt_engine.payload.manifest import Manifest, WeightKind
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import ConfigError, WeightSyncError
from rl_protocol.support.network_interface import NetworkInterface

_FAILS_IN_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_environment = threading.Lock()


class TorchGroupEngine(CheckpointEngine):
    """Broadcasts from a sender's versions into receivers' buffers, over a `ProcessGroup`.

    Raises:
        ConfigError: `listen` is not an address, or is not loopback and the network is not declared
            as trusted.
    """

    def __init__(self, config: CheckpointEngineConfig | None = None) -> None:
        self._config = CheckpointEngineConfig() if config is None else config
        self._sending = self._new_sender()
        self._offered: VersionSender[Slot] | None = None
        self._buffers = ReceiveBuffers(self._config.bucket_bytes)
        self._received: Manifest | None = None
        need = f"{TRUSTED}=1 in the environment of sender and receivers, as engine {self.name!r} has no keys; engine 'tcp' has"
        listen = listen_address(self._config.listen, allowed=network_is_trusted(), need=need)
        self._group = ProcessGroup(listen, self._new_collective(), lambda: self._buffers.current.clear())

    @classmethod
    def create(cls, config: CheckpointEngineConfig) -> Self:
        return cls(config)

    @abstractmethod
    def _new_collective(self) -> Collective:
        """How members of the group broadcast."""

    def _new_sender(self) -> VersionSender[Slot]:
        return VersionSender(self.name, Slot, bytes)  # no identity: a version may be broadcast in several groups

    # ---- group

    def prepare(self) -> bytes:
        """This member's metadata, which change after each `init_process_group`."""
        return self._group.member()

    @classmethod
    def build_topology(cls, sender_metadata: bytes, receiver_metadatas: Sequence[bytes]) -> Topology:
        return places_of(sender_metadata, receiver_metadatas)

    def init_process_group(self, member: bytes) -> None:
        """Leave the current group and set the next one, which `join` forms."""
        self._group.place(member)

    async def join(self, *, timeout_s: float) -> None:
        await self._group.join(timeout_s)

    def leave(self) -> None:
        """Abort the group; a group that failed is never reused."""
        self._group.leave()

    # ---- sender

    async def send_weights(
        self, weights: Iterable[WeightTensor], version: int, *, timeout_s: float, kind: WeightKind = "full"
    ) -> Manifest:
        return await self._sending.send(weights, version, timeout_s=timeout_s, kind=kind)

    async def serve(self, manifest: Manifest, *, timeout_s: float) -> None:
        self._group.require()
        published = self._published(manifest)
        if published is None:
            self.leave()
            raise WeightSyncError(f"Version {manifest.version} is no longer available; a new sync is needed.")
        deadline = Deadline(timeout_s, f"Serving version {manifest.version}", f"engine {self.name}")
        if manifest.payload_nbytes == 0:
            return
        memory = published.held.payload(0, manifest.payload_nbytes)
        assert memory is not None, "the slot holds the payload of its manifest"
        buckets = list(split_into_buckets(manifest.tensors, memory, self._config.bucket_bytes))
        async for _ in self._group.broadcast(buckets, deadline):
            pass

    async def offer(
        self, weights: Iterable[WeightTensor], version: int, *, timeout_s: float, kind: WeightKind = "full"
    ) -> Manifest:
        """Publish a copy of the weights again; it is kept until a later version is finalized."""
        self._close_offered()
        self._offered = offered = self._new_sender()
        manifest = await offered.send(weights, version, timeout_s=timeout_s, kind=kind)
        offered.finalize(version)
        return manifest

    def finalize(self, version: int) -> None:
        self._sending.finalize(version)
        self._close_offered()

    def abort(self) -> None:
        self._sending.abort()

    def _published(self, manifest: Manifest) -> Published[Slot] | None:
        found = self._sending.versions.find(manifest.sync_id)
        if found is None and self._offered is not None:
            return self._offered.versions.find(manifest.sync_id)
        return found

    def _close_offered(self) -> None:
        if self._offered is not None:
            self._offered.close()
            self._offered = None

    # ---- receiver

    async def receive_weights(self, manifest: Manifest, *, timeout_s: float) -> list[WeightTensor]:
        deadline = receiving(manifest, timeout_s, self.name)
        self._group.require()
        deadline.check()
        self._received = None
        buffer = self._buffers.next()
        buffer.forget()  # every member receives every bucket
        weights = await buffer.fill(manifest, lambda buckets: self._group.broadcast(buckets, deadline), deadline)
        self.verify_seconds = buffer.verify_seconds
        self._received = manifest
        return weights

    def confirm(self, manifest: Manifest) -> None:
        require_received(manifest, self._received)

    def watch(self, manifest: Manifest) -> Callable[[], None]:
        self.confirm(manifest)
        return self._buffers.current.hold()

    # ---- end

    def close(self) -> None:
        self._group.close()
        self._close_offered()
        self._sending.close()
        self._received = None
        self._buffers.clear()


class GlooEngine(TorchGroupEngine):
    """Broadcasts directly between host memory."""

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "gloo"
    capabilities: ClassVar[Capabilities] = Capabilities(
        same_host_only=False, zero_copy=False, elastic=False, devices=("cpu",), shares=True
    )

    def _new_collective(self) -> Collective:
        return GlooCollective()


class GlooCollective:
    """Broadcasts host memory over TCP."""

    def form(self, store: dist.Store, place: GroupPlace, interface: NetworkInterface, timeout: timedelta) -> Any:
        gloo = cast("Any", dist.ProcessGroupGloo)  # torch has no public way to choose the interface of one group
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=interface.address)]
        options._timeout = timeout
        return gloo(store, place.rank, place.size, options)

    def start(self, group: Any, rank: int, memory: torch.Tensor) -> Transfer:
        del rank
        return Transfer(group.broadcast(memory, 0))


class NcclEngine(TorchGroupEngine):
    """Broadcasts between GPUs through device buckets; source and destination are host memory.

    Raises:
        ConfigError: there is no GPU, or torch was built without NCCL.
    """

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "nccl"
    capabilities: ClassVar[Capabilities] = Capabilities(
        same_host_only=False, zero_copy=False, elastic=False, devices=("cuda",), shares=True
    )

    def _new_collective(self) -> Collective:
        return NcclCollective()


class NcclCollective:
    """Broadcasts two buckets in device memory, in turns.

    Raises:
        ConfigError: there is no GPU, or torch was built without NCCL.
    """

    def __init__(self) -> None:
        if not (torch.cuda.is_available() and dist.is_nccl_available()):
            raise ConfigError(
                "Engine 'nccl' needs a GPU and a torch with NCCL; set CheckpointEngineConfig.backend to gloo."
            )
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._buckets = [torch.empty(0, dtype=torch.uint8, device=self._device) for _ in range(2)]

    def form(self, store: dist.Store, place: GroupPlace, interface: NetworkInterface, timeout: timedelta) -> Any:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface.name_for_nccl)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout  # pyright: ignore[reportPrivateUsage]
        torch.cuda.set_device(self._device)
        with _failing_in_wait():
            group: Any = dist.ProcessGroupNCCL(store, place.rank, place.size, options)
        # the first broadcast connects, and blocks until all members take part
        group.broadcast(torch.zeros(1, dtype=torch.uint8, device=self._device), 0).wait(timeout)
        return group

    def start(self, group: Any, rank: int, memory: torch.Tensor) -> Transfer:
        torch.cuda.set_device(self._device)
        self._buckets.reverse()
        if self._buckets[0].nbytes < memory.nbytes:
            self._buckets[0] = torch.empty(memory.nbytes, dtype=torch.uint8, device=self._device)
        bucket = self._buckets[0][: memory.nbytes]
        if rank == 0:
            bucket.copy_(memory)
        return Transfer(group.broadcast(bucket, 0), None if rank == 0 else lambda: memory.copy_(bucket))


@contextmanager
def _failing_in_wait() -> Generator[None]:
    """Context in which a group of NCCL is made that raises errors of its members, and deadlines, in
    `wait`.

    By default a thread of torch notices them, and ends the whole process a minute later. The waits
    of other groups in the process are left as they are.
    """
    with _environment:
        before = os.environ.get(_FAILS_IN_WAIT)
        os.environ[_FAILS_IN_WAIT] = "1"
        try:
            yield
        finally:
            del os.environ[_FAILS_IN_WAIT]
            if before is not None:
                os.environ[_FAILS_IN_WAIT] = before
