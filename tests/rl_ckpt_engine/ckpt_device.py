"""A Device over shared memory, for tests without a GPU; its handles are paths under /proc."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

from rl_ckpt_engine.engines.one_host.cuda_memory import HANDLE_BYTES
from rl_protocol.errors import WeightSyncError

Bytes = npt.NDArray[np.uint8]


class SharedMemoryDevice:
    """The port `Device` over shared memory.

    Attributes:
        allocated: address -> file descriptor and memory, for allocations not yet freed.
        opened: address -> memory, for opened handles not yet closed.
    """

    def __init__(self) -> None:
        self.allocated: dict[int, tuple[int, Bytes]] = {}
        self.opened: dict[int, Bytes] = {}

    def allocate(self, nbytes: int) -> int:
        fd = os.memfd_create("device")
        os.ftruncate(fd, nbytes)
        memory = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        self.allocated[memory.ctypes.data] = fd, memory
        return memory.ctypes.data

    def free(self, address: int) -> None:
        os.close(self.allocated.pop(address)[0])

    def handle(self, address: int) -> bytes:
        return f"/proc/{os.getpid()}/fd/{self.allocated[address][0]}".encode().ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        try:
            fd = os.open(handle.rstrip(b"\0"), os.O_RDONLY)
        except OSError as error:
            raise WeightSyncError(f"The device refuses: {error}.") from error
        memory = np.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_READ), np.uint8)
        os.close(fd)
        self.opened[memory.ctypes.data] = memory
        return memory.ctypes.data

    def close(self, address: int) -> None:
        del self.opened[address]

    def write(self, address: int, data: Bytes) -> None:
        self.allocated[address][1][: data.nbytes] = data

    def read(self, address: int, into: Bytes) -> None:
        into[:] = self.opened[address][: into.nbytes]
