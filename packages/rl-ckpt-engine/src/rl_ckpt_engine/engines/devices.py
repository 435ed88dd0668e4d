"""Memory of a GPU that other processes of the host can open: a small port, and CUDA behind it."""

from __future__ import annotations

import contextlib
import ctypes
from importlib import import_module
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from rl_protocol.errors import ConfigError, WeightSyncError

HANDLE_BYTES = 64
_GRANULE = 2 << 20
"""CUDA puts smaller allocations into one block, and a handle opens the block."""
Bytes = npt.NDArray[np.uint8]


class Device(Protocol):
    """Every call may come from any thread, and raises WeightSyncError when the device refuses it."""

    def allocate(self, nbytes: int) -> int:
        """Address of new memory of the device."""
        ...

    def free(self, address: int) -> None:
        """Give back what `allocate` returned. Nobody may have it open."""
        ...

    def handle(self, address: int) -> bytes:
        """HANDLE_BYTES by which another process can open what `allocate` returned."""
        ...

    def open(self, handle: bytes) -> int:
        """Address in this process of memory that another one allocated."""
        ...

    def close(self, address: int) -> None:
        """Give back what `open` returned."""
        ...

    def write(self, address: int, data: Bytes) -> None:
        """Copy uint8 [nbytes] to the device; when it returns, whoever has opened the memory reads them."""
        ...

    def read(self, address: int, into: Bytes) -> None:
        """Copy from the device into uint8 [nbytes]; when it returns, they are there."""
        ...


class CudaDevice:
    """The CUDA device that is current in the thread which makes this object, through CUDA's runtime API.

    Raises:
        ConfigError: cuda-bindings are not installed, or there is no device.
    """

    _exported: ClassVar[dict[bytes, int]] = {}
    """Handle -> address of what this process has allocated: CUDA opens it in other processes alone."""

    def __init__(self) -> None:
        try:
            self._cuda: Any = import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise ConfigError(f"CUDA can't be loaded: {error}. Install rl-ckpt-engine[cuda].") from error
        error, number = self._cuda.cudaGetDevice()
        if error != self._cuda.cudaError_t.cudaSuccess:
            raise ConfigError(
                f"There is no CUDA device here: {error.name}. Set checkpoint_engine.backend to shm, which moves the same bytes without."
            )
        self._number = number

    def allocate(self, nbytes: int) -> int:
        """See Device.allocate."""
        return int(self._do("cudaMalloc", -(-nbytes // _GRANULE) * _GRANULE))

    def free(self, address: int) -> None:
        """See Device.free."""
        for handle in [handle for handle, known in self._exported.items() if known == address]:
            del self._exported[handle]
        self._do("cudaFree", address)

    def handle(self, address: int) -> bytes:
        """See Device.handle."""
        given = self._do("cudaIpcGetMemHandle", address)  # keeps what getPtr points at
        handle = ctypes.string_at(given.getPtr(), HANDLE_BYTES)
        self._exported[handle] = address
        return handle

    def open(self, handle: bytes) -> int:
        """See Device.open."""
        if handle in self._exported:
            return self._exported[handle]
        given = self._cuda.cudaIpcMemHandle_t()
        ctypes.memmove(given.getPtr(), handle, HANDLE_BYTES)
        return int(self._do("cudaIpcOpenMemHandle", given, self._cuda.cudaIpcMemLazyEnablePeerAccess))

    def close(self, address: int) -> None:
        """See Device.close."""
        if address not in self._exported.values():
            self._do("cudaIpcCloseMemHandle", address)

    def write(self, address: int, data: Bytes) -> None:
        """See Device.write."""
        self._copy(address, _address(data), data.nbytes, self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice)

    def read(self, address: int, into: Bytes) -> None:
        """See Device.read."""
        self._copy(_address(into), address, into.nbytes, self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost)

    def _copy(self, to: int, of: int, nbytes: int, kind: Any) -> None:
        stream = self._cuda.cudaStreamPerThread
        self._do("cudaMemcpyAsync", to, of, nbytes, kind, stream)
        self._do(
            "cudaStreamSynchronize", stream
        )  # a copy of pageable memory may return before its last bytes are there

    def _do(self, call: str, *arguments: object) -> Any:
        """What a call of CUDA returned besides its verdict; on the device of this object, whichever is current in the calling thread."""
        self._check("cudaSetDevice", self._cuda.cudaSetDevice(self._number))
        return self._check(call, getattr(self._cuda, call)(*arguments))

    def _check(self, call: str, answer: tuple[Any, ...]) -> Any:
        error, *results = answer
        if error != self._cuda.cudaError_t.cudaSuccess:
            raise WeightSyncError(
                f"{call} failed with {error.name}. Are sender and receiver on the same GPU or on two that reach each other, in one container?"
            )
        return results[0] if results else None


class Windows:
    """What this process has opened of another's memory, by handle."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._open: dict[bytes, int] = {}

    def read(self, handle: bytes, into: Bytes) -> None:
        """Copy from the beginning of that memory into uint8 [nbytes].

        Raises:
            WeightSyncError: it can't be opened or read.
        """
        if handle not in self._open:
            self._open[handle] = self._device.open(handle)
        self._device.read(self._open[handle], into)

    def close(self) -> None:
        """Close all; safe to call twice."""
        with contextlib.ExitStack() as stack:
            while self._open:
                stack.callback(self._device.close, self._open.popitem()[1])


def _address(data: Bytes) -> int:
    return int(data.__array_interface__["data"][0])
