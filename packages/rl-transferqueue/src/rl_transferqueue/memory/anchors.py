"""Memory views that keep an object alive, so that its end shows that no view is left."""

from __future__ import annotations

import mmap

import numpy as np


class Anchor:
    """Referred to by all memory of one lease; the lease ends when the anchor is garbage
    collected."""

    __slots__ = ("__weakref__",)


class _Anchored(np.ndarray):
    """An array that keeps an object alive as long as a view of its memory exists."""

    anchor: object


def anchored(memory: mmap.mmap, start: int, nbytes: int, anchor: object) -> memoryview:
    """Part of a mapping; the view and all views made from it keep `anchor` alive."""
    array = np.frombuffer(memory, np.uint8, nbytes, start).view(_Anchored)
    array.anchor = anchor
    return array.data
