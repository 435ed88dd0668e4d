"""A pool of buffers that gets copy or receive rows into.

The pages of a buffer are used again once no view of them is left. Fresh pages would cost as much as
the copy: the kernel clears each of them first.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import weakref

import numpy as np
import numpy.typing as npt

from rl_protocol.batch.columns import AnyArray
from rl_protocol.support.host.aligned_memory import aligned_bytes
from rl_protocol.support.host.portable import uses_linux
from rl_transferqueue.memory.anchors import anchored

_POOLED_FROM = 1 << 20
"""Smaller buffers come from the process's allocator, which reuses its pages."""
_IDLE_BYTES = 512 << 20


class _InUse:
    """Referred to by all views of one buffer."""

    __slots__ = ("__weakref__",)


def _new(size: int) -> mmap.mmap:
    buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if uses_linux():
        with contextlib.suppress(OSError):  # a kernel without huge pages
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


class ReceivePool:
    """Pool of buffers by size; at most 512 MiB are idle."""

    def __init__(self) -> None:
        self._idle: list[mmap.mmap] = []
        self._lock = threading.RLock()  # a finalizer may run inside `take`

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> AnyArray:
        """An uninitialized array that begins at a multiple of 64 bytes, as blocks do; see
        `aligned_bytes`."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes >= _POOLED_FROM:
            return np.frombuffer(self.take(nbytes), dtype).reshape(shape)
        return aligned_bytes(nbytes).view(dtype).reshape(shape)

    def take(self, nbytes: int) -> memoryview:
        """Writable memory of that size; it returns to the pool when nothing refers to it
        any more."""
        if nbytes < _POOLED_FROM:
            return memoryview(bytearray(nbytes))
        size = 1 << (nbytes - 1).bit_length()
        with self._lock:
            found = next((i for i in reversed(range(len(self._idle))) if len(self._idle[i]) == size), None)
            buffer = _new(size) if found is None else self._idle.pop(found)
        in_use = _InUse()
        weakref.finalize(in_use, self._give, buffer).atexit = False
        return anchored(buffer, 0, nbytes, in_use)

    def _give(self, buffer: mmap.mmap) -> None:
        with self._lock:
            self._idle.append(buffer)
            while sum(len(idle) for idle in self._idle) > _IDLE_BYTES:
                self._idle.pop(0)
