"""Engine `cuda_ipc` over a simulated GPU; tests with the marker gpu use CUDA."""

from __future__ import annotations

import asyncio
import ctypes
import enum
import sys
from contextlib import AsyncExitStack
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from ckpt_device import SharedMemoryDevice
from ckpt_remote import SHAPES, started
from polling import until

from rl_ckpt_engine import CheckpointEngine, CheckpointEngineConfig, CheckpointEngineManager, CheckpointEngineRegistry
from rl_ckpt_engine.engines.network.tcp_transport import TcpMember
from rl_ckpt_engine.engines.one_host.cuda_ipc import CudaIpcEngine
from rl_ckpt_engine.engines.one_host.cuda_memory import HANDLE_BYTES, CudaDevice
from rl_ckpt_engine.testing import EngineConformance, assert_same, make_weights, refusal
from rl_protocol.errors import ConfigError, WeightSyncError

T = 60.0
SMALL = CheckpointEngineConfig(bucket_mb=0.1)
"""Small buckets, so that tensors span several."""


class TestOverAStandIn(EngineConformance):
    def make_engine(self) -> CheckpointEngine:
        return CudaIpcEngine(SMALL, SharedMemoryDevice())


@pytest.mark.gpu
class TestCudaIpc(EngineConformance):
    def make_engine(self) -> CheckpointEngine:
        return CheckpointEngineRegistry().create("cuda_ipc", SMALL)


@pytest.mark.gpu
def test_two_processes_share_the_memory_of_a_gpu() -> None:
    asyncio.run(_sync_twice("cuda_ipc-gpu"))


def test_two_processes_sync_and_a_dead_sender_is_named() -> None:
    asyncio.run(_sync_twice("cuda_ipc"))


async def _sync_twice(engine: str) -> None:
    async with AsyncExitStack() as stack:
        sender, one, late = await asyncio.gather(
            *(
                stack.enter_async_context(started(role, name, engine))
                for role, name in (("sender", "s"), ("receiver", "one"), ("receiver", "late"))
            )
        )
        manager = CheckpointEngineManager(sender, [one], CheckpointEngineConfig(timeout_s=T))
        for version in (1, 2):
            assert (await manager.update_weights(version)).receivers == ("one",)
            assert await one.has(version)
        await sender.kill()
        with pytest.raises(WeightSyncError, match="send: the sender failed"):
            await manager.update_weights(3)
        assert await one.has(2)
        await manager.add_receiver(late)
        assert await late.has(2), "from a replica, through the device as well"


def joined(sender: CudaIpcEngine, device: SharedMemoryDevice) -> CudaIpcEngine:
    receiver = CudaIpcEngine(SMALL, device)
    topology = CudaIpcEngine.build_topology(sender.prepare(), [receiver.prepare()])
    sender.init_process_group(topology.sender)
    receiver.init_process_group(topology.receivers[0])
    return receiver


def test_a_receiver_costs_two_buckets_that_are_open_only_within_a_sync() -> None:
    ours, theirs = SharedMemoryDevice(), SharedMemoryDevice()
    sender = CudaIpcEngine(SMALL, ours)
    receiver = joined(sender, theirs)
    for version in (1, 2, 3):
        weights = make_weights(SHAPES, seed=version)
        manifest = asyncio.run(sender.send_weights(weights, version, timeout_s=T))
        assert manifest.payload_nbytes > 3 * SMALL.bucket_bytes
        assert_same(asyncio.run(receiver.receive_weights(manifest, timeout_s=T)), weights)
        sender.finalize(version)
        assert [memory.nbytes for _, memory in ours.allocated.values()] == [SMALL.bucket_bytes] * 2
        assert not theirs.opened
    receiver.close()
    until(lambda: not ours.allocated, "the buffers are freed", T)
    sender.close()


def test_buckets_of_a_receiver_that_asks_for_more_grow() -> None:
    ours, theirs = SharedMemoryDevice(), SharedMemoryDevice()
    sender = CudaIpcEngine(CheckpointEngineConfig(bucket_mb=0.01), ours)
    receiver = joined(sender, theirs)
    weights = make_weights(SHAPES)
    manifest = asyncio.run(sender.send_weights(weights, 1, timeout_s=T))
    assert_same(asyncio.run(receiver.receive_weights(manifest, timeout_s=T)), weights)
    assert max(memory.nbytes for _, memory in ours.allocated.values()) == SMALL.bucket_bytes
    receiver.close()
    until(lambda: not ours.allocated, "the buffers are freed", T)
    sender.close()


def test_a_byte_that_the_device_changes_is_noticed() -> None:
    class Faulty(SharedMemoryDevice):
        faults = 1

        def write(self, address: int, data: np.ndarray) -> None:
            super().write(address, data)
            if self.faults:
                self.faults -= 1
                self.allocated[address][1][50] ^= 1

    theirs = SharedMemoryDevice()
    sender = CudaIpcEngine(SMALL, Faulty())
    receiver = joined(sender, theirs)
    weights = make_weights(SHAPES)
    manifest = asyncio.run(sender.send_weights(weights, 1, timeout_s=T))
    assert "'w0' of version 1 arrived damaged" in refusal(receiver.receive_weights(manifest, timeout_s=T))
    assert not theirs.opened
    assert_same(asyncio.run(receiver.receive_weights(manifest, timeout_s=T)), weights)
    receiver.close()
    sender.close()


def test_a_device_that_is_full_or_closed_to_the_other_is_a_named_error(caplog: pytest.LogCaptureFixture) -> None:
    class Full(SharedMemoryDevice):
        def allocate(self, nbytes: int) -> int:
            raise WeightSyncError("cudaMalloc failed with cudaErrorMemoryAllocation.")

    class Closed(SharedMemoryDevice):
        def open(self, handle: bytes) -> int:
            raise WeightSyncError("cudaIpcOpenMemHandle failed with cudaErrorMapBufferObjectFailed.")

    for ours, theirs, message in (
        (Full(), SharedMemoryDevice(), "A new sync is needed|a new sync is needed"),
        (SharedMemoryDevice(), Closed(), "cudaIpcOpenMemHandle failed"),
    ):
        sender = CudaIpcEngine(SMALL, ours)
        receiver = joined(sender, theirs)
        manifest = asyncio.run(sender.send_weights(make_weights(SHAPES), 1, timeout_s=T))
        with pytest.raises(WeightSyncError, match=message):
            asyncio.run(receiver.receive_weights(manifest, timeout_s=T))
        receiver.close()
        sender.close()
    assert "cudaMalloc failed" in caplog.text


def test_another_host_is_refused() -> None:
    sender = CudaIpcEngine(SMALL, SharedMemoryDevice())
    mine = msgspec.msgpack.decode(sender.prepare(), type=TcpMember)
    elsewhere = msgspec.msgpack.encode(msgspec.structs.replace(mine, node="other-boot/pid:[1]"))
    assert "a receiver on other-boot" in refusal(lambda: CudaIpcEngine.build_topology(sender.prepare(), [elsewhere]))
    sender.close()


def test_it_listens_on_loopback_whatever_tcp_is_told() -> None:
    sender = CudaIpcEngine(CheckpointEngineConfig(listen="192.0.2.1"), SharedMemoryDevice())
    assert msgspec.msgpack.decode(sender.prepare(), type=TcpMember).host == "127.0.0.1"
    sender.close()


class Code(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorNoDevice = 100


class Handle:
    def __init__(self) -> None:
        self.memory = (ctypes.c_char * HANDLE_BYTES)()

    def getPtr(self) -> int:
        return ctypes.addressof(self.memory)


class Runtime(SimpleNamespace):
    """A fake CUDA runtime of cuda-bindings over host memory; it records its calls."""

    cudaError_t = Code
    cudaIpcMemHandle_t = Handle
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice="up", cudaMemcpyDeviceToHost="down")
    cudaStreamPerThread = "mine"
    cudaIpcMemLazyEnablePeerAccess = 1

    def __init__(self, device: Code = Code.cudaSuccess) -> None:
        super().__init__(calls=[], held={}, device=device)

    def cudaGetDevice(self) -> tuple[Code, int | None]:
        return (self.device, None) if self.device else (self.device, 3)

    def cudaSetDevice(self, number: int) -> tuple[Code]:
        assert number == 3
        return (Code.cudaSuccess,)

    def cudaMalloc(self, nbytes: int) -> tuple[Code, int | None]:
        self.calls.append(("malloc", nbytes))
        buffer = (ctypes.c_char * nbytes)()
        self.held[ctypes.addressof(buffer)] = buffer
        return Code.cudaSuccess, ctypes.addressof(buffer)

    def cudaFree(self, address: int) -> tuple[Code]:
        return (Code.cudaSuccess if self.held.pop(address, None) else Code.cudaErrorInvalidValue,)

    def cudaIpcGetMemHandle(self, address: int) -> tuple[Code, Handle]:
        handle = Handle()
        handle.memory.raw = address.to_bytes(HANDLE_BYTES, "little")
        return Code.cudaSuccess, handle

    def cudaIpcOpenMemHandle(self, handle: Handle, flags: int) -> tuple[Code, int]:
        assert flags == 1
        self.calls.append(("open",))
        return Code.cudaSuccess, int.from_bytes(handle.memory.raw, "little")

    def cudaIpcCloseMemHandle(self, address: int) -> tuple[Code]:
        self.calls.append(("close",))
        return (Code.cudaSuccess,)

    def cudaMemcpyAsync(self, to: int, of: int, nbytes: int, kind: str, stream: str) -> tuple[Code]:
        self.calls.append((kind, stream))
        ctypes.memmove(to, of, nbytes)
        return (Code.cudaSuccess,)

    def cudaStreamSynchronize(self, stream: str) -> tuple[Code]:
        self.calls.append(("wait", stream))
        return (Code.cudaSuccess,)


def test_cuda_is_called_as_it_wants_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", runtime)
    monkeypatch.setattr(CudaDevice, "_exported", {})
    device = CudaDevice()
    address = device.allocate(10)
    handle = device.handle(address)
    assert len(handle) == HANDLE_BYTES
    device.write(address, np.arange(10, dtype=np.uint8))
    got = np.zeros(10, np.uint8)
    assert device.open(handle) == address, "its own memory is not opened"
    device.read(address, got)
    assert got.tolist() == list(range(10))
    device.close(address)
    assert runtime.calls == [
        ("malloc", 2 << 20),
        ("up", "mine"),
        ("wait", "mine"),
        ("down", "mine"),
        ("wait", "mine"),
    ]
    CudaDevice._exported.clear()  # as in another process
    assert device.open(handle) == address
    device.close(address)
    assert runtime.calls[-2:] == [("open",), ("close",)]
    device.free(address)
    with pytest.raises(WeightSyncError, match="cudaFree failed with cudaErrorInvalidValue"):
        device.free(address)


def test_without_a_device_or_the_bindings_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", Runtime(device=Code.cudaErrorNoDevice))
    with pytest.raises(
        ConfigError, match=r"no CUDA device here: cudaErrorNoDevice\. Set CheckpointEngineConfig\.backend to shm"
    ):
        CheckpointEngineRegistry().create("cuda_ipc")
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(ConfigError, match=r"Install rl-ckpt-engine\[cuda\]"):
        CheckpointEngineRegistry().create("cuda_ipc")
