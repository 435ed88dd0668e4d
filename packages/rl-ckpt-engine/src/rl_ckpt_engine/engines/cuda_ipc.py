"""Engine `cuda_ipc`: the weights go through memory of a GPU that the trainer's process and those of its rollout on the same host have open.

What a receiver asks for, and what the sender answers, is that of engine `tcp` on loopback, with one difference: the bytes of a bucket are not sent.
The sender copies them into one of two buckets on the device and sends its handle, HANDLE_BYTES; the receiver opens it and copies them out.

* A receiver MUST NOT ask for bucket k + 2 before it has copied bucket k, whose place on the device it takes. So one is filled while the
  other is emptied.
* A receiver MUST close what it has opened before its sync or its connection ends: buckets are freed with the connection.

Weights are in host memory at both ends, as WeightTensor has them, and the receiver computes their digests there: this engine moves bytes over the
GPU's bus twice that `shm` does not move at all. It is the way for a source and a sink on the device.
"""

from __future__ import annotations

import logging
import mmap
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from typing import ClassVar, NamedTuple, Self

import numpy as np

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.engine import Capabilities
from rl_ckpt_engine.engines.devices import HANDLE_BYTES, Bytes, CudaDevice, Device, Windows
from rl_ckpt_engine.engines.tcp import LOOPBACK, Courier, Receiving, TcpEngine, read_member
from rl_ckpt_engine.manifest import Manifest
from rl_ckpt_engine.staging import Bucket
from rl_ckpt_engine.stream import Deadline
from rl_protocol.errors import WeightSyncError

_log = logging.getLogger(__name__)


class CudaIpcEngine(TcpEngine):
    """See the module's docstring. A sender's memory is that of engine `tcp` and two buckets on the device for each receiver.

    Args:
        config: settings; `listen` is of no concern.
        device: where buckets are; the thread's CUDA device by default.

    Raises:
        ConfigError: there is no CUDA device, or no cuda-bindings.
    """

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "cuda_ipc"
    capabilities: ClassVar[Capabilities] = Capabilities(
        same_host_only=True, zero_copy=False, elastic=True, devices=("cuda",)
    )

    def __init__(self, config: CheckpointEngineConfig | None = None, device: Device | None = None) -> None:
        super().__init__(replace(config or CheckpointEngineConfig(), listen=LOOPBACK))
        self._device: Device = CudaDevice() if device is None else device
        self._windows = Windows(self._device)

    @classmethod
    def _check_members(cls, sender: bytes, receivers: Sequence[bytes]) -> None:
        super()._check_members(sender, receivers)
        mine = read_member(sender, cls.name)
        for metadata in receivers:
            if (node := read_member(metadata, cls.name).node) != mine.node:
                raise WeightSyncError(
                    f"Engine 'cuda_ipc' works within one host and container; the sender is on {mine.node}, a receiver on {node}. Place them "
                    "together or set another checkpoint_engine.backend."
                )

    def _new_outlet(self) -> Self:
        return type(self)(self._config, self._device)

    def _new_courier(self) -> Courier:
        return DeviceCourier(self._device, self._config.bucket_bytes)

    def _receiving(self, peer: socket.socket, target: memoryview) -> Receiving:
        return DeviceReceiving(peer, target, self._windows)

    async def _pull(self, manifest: Manifest, buckets: Sequence[Bucket], deadline: Deadline) -> AsyncGenerator[None]:
        async with aclosing(super()._pull(manifest, buckets, deadline)) as pulled:
            async for _ in pulled:
                yield
        self._windows.close()

    def _hang_up(self) -> None:
        self._windows.close()
        super()._hang_up()


class DeviceBucket(NamedTuple):
    """Memory of the device."""

    address: int
    nbytes: int
    handle: bytes


class DeviceCourier:
    """Sender's side of one connection: two buckets, filled in turn.

    Args:
        least_bytes: size of a bucket, unless more is asked for at once.
    """

    def __init__(self, device: Device, least_bytes: int) -> None:
        self._device = device
        self._least_bytes = least_bytes
        self._turns = [DeviceBucket(0, 0, b"")] * 2
        self._allocated: list[int] = []

    def deliver(self, peer: socket.socket, fd: int, offset: int, size: int) -> None:
        """See Courier.deliver; what is sent is the handle of the bucket that holds the bytes."""
        try:
            bucket = self._next(size)
            self._device.write(bucket.address, _mapped(fd, offset, size))
        except WeightSyncError as error:
            _log.warning("A receiver is left without its bucket: %s", error)
            raise ConnectionAbortedError(str(error)) from error
        peer.sendall(bucket.handle)

    def close(self) -> None:
        """Free the buckets."""
        try:
            with ExitStack() as stack:
                while self._allocated:
                    stack.callback(self._device.free, self._allocated.pop())
        except WeightSyncError as error:
            _log.warning("Memory of the device was not given back: %s", error)

    def _next(self, size: int) -> DeviceBucket:
        """The bucket whose turn it is. One that is too small is freed with the connection: the receiver may have it open."""
        self._turns.reverse()
        if self._turns[0].nbytes < size:
            nbytes = max(size, self._least_bytes)
            self._allocated.append(address := self._device.allocate(nbytes))
            self._turns[0] = DeviceBucket(address, nbytes, self._device.handle(address))
        return self._turns[0]


class DeviceReceiving(Receiving):
    """The thread gets a handle and copies from the device."""

    def __init__(self, peer: socket.socket, target: memoryview, windows: Windows) -> None:
        self._windows = windows
        super().__init__(peer, target)

    def fill(self, target: memoryview) -> None:
        """See Receiving.fill."""
        handle = bytearray(HANDLE_BYTES)
        super().fill(memoryview(handle))
        self._windows.read(bytes(handle), np.frombuffer(target, np.uint8))


def _mapped(fd: int, offset: int, size: int) -> Bytes:
    """Bytes of a file, uint8 [size], read-only."""
    before = offset % mmap.ALLOCATIONGRANULARITY
    memory = mmap.mmap(fd, before + size, access=mmap.ACCESS_READ, offset=offset - before)
    return np.frombuffer(memory, np.uint8, offset=before)
