"""Buckets of weights mapped into the worker's process, and their digests."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rl_rollout_vllm.weights.buckets import DIGEST

if TYPE_CHECKING:
    from rl_rollout_vllm.weights.buckets import Entry


class MappedBuckets:
    """Shared memory of buckets by inode, mapped once for as long as the sender reuses it."""

    def __init__(self) -> None:
        self._memories: dict[int, mmap.mmap] = {}
        self._views: dict[int, weakref.ref[memoryview]] = {}
        self._reader = ThreadPoolExecutor(1, "rl-rollout-vllm-digest")

    def read(self, path: str, entries: Iterable[Entry]) -> tuple[dict[str, torch.Tensor], Future[str]]:
        """Return the tensors of a bucket, as views of its memory, and their pending DIGEST."""
        inode = Path(path).stat().st_ino  # unique while the memory is mapped
        if inode not in self._memories:
            self._memories[inode] = _map(path)
        view = memoryview(self._memories[inode])
        self._views[inode] = weakref.ref(view)  # alive as long as a tensor of the bucket
        flat = torch.frombuffer(view, dtype=torch.uint8)
        tensors: dict[str, torch.Tensor] = {}
        spans: list[tuple[int, int]] = []
        for name, dtype, shape, offset, nbytes in entries:
            tensors[name] = flat[offset : offset + nbytes].view(getattr(torch, dtype)).reshape(tuple(shape))
            spans.append((offset, offset + nbytes))
        return tensors, self._reader.submit(_digest, self._memories[inode], spans)

    def verified(self, reading: Future[str], sent: str) -> str:
        """Return the DIGEST of what was read; if it differs from `sent`, map all memory again."""
        digest = reading.result()
        if digest != sent:
            self.forget()  # the mapping itself may be wrong
        return digest

    def held(self) -> list[int]:
        """Return the inodes of the memory of which tensors are still in use."""
        self._views = {inode: view for inode, view in self._views.items() if view() is not None}
        return list(self._views)

    def forget(self) -> None:
        """Drop all mappings; memory of tensors in use is unmapped with them."""
        self._memories.clear()


def _digest(memory: mmap.mmap, spans: Iterable[tuple[int, int]]) -> str:
    found = DIGEST()
    with memoryview(memory) as view:  # separate from the view whose life tracks the tensors
        for begin, end in spans:
            found.update(view[begin:end])
    return found.hexdigest()


def _map(path: str) -> mmap.mmap:
    fd = os.open(path, os.O_RDONLY)
    try:
        # private, so that writes are not shared; writable because torch requires it
        return mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
