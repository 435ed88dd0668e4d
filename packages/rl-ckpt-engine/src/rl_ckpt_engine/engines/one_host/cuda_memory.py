"""GPU memory that other processes of the host can open, behind a Device interface."""

from __future__ import annotations

import contextlib
import ctypes
from importlib import import_module
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from rl_ckpt_engine.engines.base.memfd import address_of
from rl_protocol.errors import ConfigError, WeightSyncError

HANDLE_BYTES = 64
_GRANULE = 2 << 20
"""CUDA places several smaller allocations into one block, and a handle opens the whole block."""
Bytes = npt.NDArray[np.uint8]


class Device(Protocol):
    """Access to device memory, from any thread. All methods raise WeightSyncError if the device
    fails."""

    def allocate(self, nbytes: int) -> int:
        """Allocate device memory; returns its address."""
        ...

    def free(self, address: int) -> None:
        """Free memory returned by `allocate`. No process may have it open."""
        ...

    def handle(self, address: int) -> bytes:
        """The handle, HANDLE_BYTES long, by which another process can open allocated memory."""
        ...

    def open(self, handle: bytes) -> int:
        """Open memory allocated by another process; returns its address in this process."""
        ...

    def close(self, address: int) -> None:
        """Close memory returned by `open`."""
        ...

    def write(self, address: int, data: Bytes) -> None:
        """Copy uint8 [nbytes] to the device; complete on return, also for other processes."""
        ...

    def read(self, address: int, into: Bytes) -> None:
        """Copy from the device into uint8 [nbytes]; complete on return."""
        ...


class CudaDevice:
    """The CUDA device that is current in the creating thread, through CUDA's runtime API.

    Raises:
        ConfigError: cuda-bindings is not installed, or there is no device.
    """

    _exported: ClassVar[dict[bytes, int]] = {}
    """Handle -> address of memory allocated in this process, which CUDA can open only in other
    processes."""

    def __init__(self) -> None:
        try:
            self._cuda: Any = import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise ConfigError(f"CUDA can't be loaded: {error}. Install rl-ckpt-engine[cuda].") from error
        error, number = self._cuda.cudaGetDevice()
        if error != self._cuda.cudaError_t.cudaSuccess:
            raise ConfigError(
                f"There is no CUDA device here: {error.name}. Set CheckpointEngineConfig.backend to shm, which needs none."
            )
        self._number = number

    def allocate(self, nbytes: int) -> int:
        return int(self._do("cudaMalloc", -(-nbytes // _GRANULE) * _GRANULE))

    def free(self, address: int) -> None:
        for handle in [handle for handle, known in self._exported.items() if known == address]:
            del self._exported[handle]
        self._do("cudaFree", address)

    def handle(self, address: int) -> bytes:
        given = self._do("cudaIpcGetMemHandle", address)  # owns the memory of getPtr
        handle = ctypes.string_at(given.getPtr(), HANDLE_BYTES)
        self._exported[handle] = address
        return handle

    def open(self, handle: bytes) -> int:
        if handle in self._exported:
            return self._exported[handle]
        given = self._cuda.cudaIpcMemHandle_t()
        ctypes.memmove(given.getPtr(), handle, HANDLE_BYTES)
        return int(self._do("cudaIpcOpenMemHandle", given, self._cuda.cudaIpcMemLazyEnablePeerAccess))

    def close(self, address: int) -> None:
        if address not in self._exported.values():
            self._do("cudaIpcCloseMemHandle", address)

    def write(self, address: int, data: Bytes) -> None:
        self._copy(address, address_of(data), data.nbytes, self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice)

    def read(self, address: int, into: Bytes) -> None:
        self._copy(address_of(into), address, into.nbytes, self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost)

    def _copy(self, to: int, of: int, nbytes: int, kind: Any) -> None:
        stream = self._cuda.cudaStreamPerThread
        self._do("cudaMemcpyAsync", to, of, nbytes, kind, stream)
        # a copy of pageable memory may return before it is complete
        self._do("cudaStreamSynchronize", stream)

    def _do(self, call: str, *arguments: object) -> Any:
        """Call CUDA on the device of this object and return the result without the error code."""
        self._check("cudaSetDevice", self._cuda.cudaSetDevice(self._number))
        return self._check(call, getattr(self._cuda, call)(*arguments))

    def _check(self, call: str, answer: tuple[Any, ...]) -> Any:
        error, *results = answer
        if error != self._cuda.cudaError_t.cudaSuccess:
            raise WeightSyncError(
                f"{call} failed with {error.name}. Are sender and receiver in one container, on the same GPU or on peers?"
            )
        return results[0] if results else None


class OpenedMemory:
    """Memory of another process that this process has opened, by handle."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._open: dict[bytes, int] = {}

    def read(self, handle: bytes, into: Bytes) -> None:
        """Copy from the start of that memory into uint8 [nbytes].

        Raises:
            WeightSyncError: it can't be opened or read.
        """
        if handle not in self._open:
            self._open[handle] = self._device.open(handle)
        self._device.read(self._open[handle], into)

    def close(self) -> None:
        """Close all opened memory; safe to call twice."""
        with contextlib.ExitStack() as stack:
            while self._open:
                stack.callback(self._device.close, self._open.popitem()[1])
