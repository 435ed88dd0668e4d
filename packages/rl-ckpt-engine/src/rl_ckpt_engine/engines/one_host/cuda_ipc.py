"""Engine `cuda_ipc`: sender and receivers on one host exchange the weights through GPU memory.

The protocol is that of engine `tcp` on loopback, except that the sender does not send the bytes of
a bucket. It copies them into one of two buckets on the device and sends the bucket's IPC handle
(HANDLE_BYTES); the receiver opens the handle and copies the bytes out.

* A receiver MUST NOT request bucket k + 2 before it has copied bucket k, because both use the same
  memory. So one bucket is filled while the other is emptied.
* A receiver MUST close opened handles before its sync or connection ends: buckets are freed with
  the connection.

Weights are in host memory at both ends, so every byte crosses the GPU's bus twice, which `shm`
avoids. The engine prepares for sources and sinks on the device.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from typing import ClassVar, NamedTuple, Self

import numpy as np

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.engines.base.memfd import Slot
from rl_ckpt_engine.engines.base.publishing_engine import PublishingEngine
from rl_ckpt_engine.engines.base.receive_buffer import Bucket
from rl_ckpt_engine.engines.contract import Capabilities
from rl_ckpt_engine.engines.network.tcp_secret import load_key
from rl_ckpt_engine.engines.network.tcp_transport import BucketReceive, TcpTransport, read_member
from rl_ckpt_engine.engines.one_host.cuda_memory import HANDLE_BYTES, Bytes, CudaDevice, Device, OpenedMemory
from rl_ckpt_engine.payload.block_stream import Deadline
from rl_ckpt_engine.payload.manifest import Manifest
from rl_protocol.errors import WeightSyncError

_log = logging.getLogger(__name__)
_LOOPBACK = "127.0.0.1"


class CudaIpcEngine(PublishingEngine[Slot]):
    """Exchanges buckets in GPU memory; a sender holds two buckets on the device for each receiver.

    Args:
        config: settings; `listen` is ignored.
        device: device of the buckets; defaults to the thread's CUDA device.

    Raises:
        ConfigError: there is no CUDA device, or cuda-bindings is not installed.
    """

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "cuda_ipc"
    capabilities: ClassVar[Capabilities] = Capabilities(
        same_host_only=True, zero_copy=False, elastic=True, devices=("cuda",), caches=True
    )

    def __init__(self, config: CheckpointEngineConfig | None = None, device: Device | None = None) -> None:
        super().__init__(config)
        self._device: Device = CudaDevice() if device is None else device
        self._opened = OpenedMemory(self._device)
        self._transport = TcpTransport(
            self.name,
            _LOOPBACK,
            load_key(),
            self._sending.versions.find,
            new_bucket_sender=lambda: DeviceBucketSender(self._device, self._config.bucket_bytes),
            receive_bucket=lambda peer, bucket: DeviceBucketReceive(peer, bucket, self._opened),
            before_hang_up=self._opened.close,
        )

    def prepare(self) -> bytes:
        return self._transport.member()

    def _identity(self) -> bytes:
        return self._transport.sending_member()

    @classmethod
    def _check_members(cls, sender: bytes, receivers: Sequence[bytes]) -> None:
        mine = read_member(sender, cls.name)
        for metadata in receivers:
            if (node := read_member(metadata, cls.name).node) != mine.node:
                raise WeightSyncError(
                    f"Engine 'cuda_ipc' works within one host and container; the sender is on {mine.node}, a receiver on {node}. Place them "
                    "together or set another CheckpointEngineConfig.backend."
                )

    def _new_republisher(self) -> Self:
        return type(self)(self._config, self._device)

    def _forget_sender(self) -> None:
        self._transport.hang_up()

    def _new_store(self) -> Slot:
        return Slot()

    async def _pull(self, manifest: Manifest, buckets: Sequence[Bucket], deadline: Deadline) -> AsyncGenerator[None]:
        async with aclosing(self._transport.pull(manifest, buckets, deadline)) as pulled:
            async for _ in pulled:
                yield
        self._opened.close()

    def close(self) -> None:
        self._transport.close()
        with self._transport.lock:
            super().close()


class DeviceBucket(NamedTuple):
    """A bucket in device memory."""

    address: int
    nbytes: int
    handle: bytes


class DeviceBucketSender:
    """Sender side of one connection: fills two device buckets alternately.

    Args:
        device: the device.
        least_bytes: minimum size of a bucket.
    """

    def __init__(self, device: Device, least_bytes: int) -> None:
        self._device = device
        self._least_bytes = least_bytes
        self._turns = [DeviceBucket(0, 0, b"")] * 2
        self._allocated: list[int] = []

    def deliver(self, peer: socket.socket, payload: Bytes) -> None:
        """See BucketSender.deliver; what is sent is the handle of the bucket that holds the
        bytes."""
        try:
            bucket = self._next(payload.nbytes)
            self._device.write(bucket.address, payload)
        except WeightSyncError as error:
            _log.warning("A bucket could not be delivered to a receiver: %s", error)
            raise ConnectionAbortedError(str(error)) from error
        peer.sendall(bucket.handle)

    def close(self) -> None:
        """Free the buckets."""
        try:
            with ExitStack() as stack:
                while self._allocated:
                    stack.callback(self._device.free, self._allocated.pop())
        except WeightSyncError as error:
            _log.warning("Device memory was not freed: %s", error)

    def _next(self, size: int) -> DeviceBucket:
        """The next bucket. One that is too small stays allocated until `close`: the receiver may
        have it open."""
        self._turns.reverse()
        if self._turns[0].nbytes < size:
            nbytes = max(size, self._least_bytes)
            self._allocated.append(address := self._device.allocate(nbytes))
            self._turns[0] = DeviceBucket(address, nbytes, self._device.handle(address))
        return self._turns[0]


class DeviceBucketReceive(BucketReceive):
    """Receives the handle of a bucket and copies the bytes from the device."""

    def __init__(self, peer: socket.socket, bucket: Bucket, windows: OpenedMemory) -> None:
        self._opened = windows
        super().__init__(peer, bucket)

    def fill(self, bucket: Bucket) -> None:
        handle = bytearray(HANDLE_BYTES)
        for _ in self.receive(memoryview(handle)):
            pass
        self._opened.read(bytes(handle), np.frombuffer(bucket.memory, np.uint8))
