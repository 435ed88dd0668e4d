"""Memory that processors copy to and from at full speed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ALIGN = 64
"""A cache line; what torch aligns tensors to."""


def aligned_bytes(nbytes: int) -> npt.NDArray[np.uint8]:
    """Uninitialized memory, uint8 [nbytes], that begins at a multiple of 64 bytes.

    The C library returns large memory 16 bytes after the start of a page. Some processors copy more
    slowly if the target lies a few bytes after the source modulo the page size (an AMD EPYC up to
    2.4 times; glibc bug 30994), as such memory does for a source at the start of a page: a mapped
    file, shared memory or another aligned buffer.

    >>> aligned_bytes(100).ctypes.data % 64, aligned_bytes(100).nbytes
    (0, 100)
    """
    raw = np.empty(nbytes + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + nbytes]
