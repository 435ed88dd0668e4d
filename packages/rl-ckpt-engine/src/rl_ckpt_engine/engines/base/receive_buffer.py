"""ReceiveBuffer: a receiver's memory for one version, filled in buckets and kept between syncs.

A tensor that is already there, from a failed sync or from the previous version, is not requested
again: a repeated sync resumes where the last one failed, and frozen weights are sent once. Tensors
are identified by name, offset and digest, and reused ones are verified, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl_ckpt_engine.payload.block_stream import Deadline, Pacer, damaged
from rl_ckpt_engine.payload.digests import TensorDigest, blocks, tensor_digest
from rl_ckpt_engine.payload.manifest import ALIGN, Manifest, TensorEntry
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError


@dataclass(frozen=True, slots=True)
class Bucket:
    """A missing range of the payload, and the memory to fill with it."""

    start: int
    """First byte, relative to the start of the payload."""
    memory: memoryview


Pull = Callable[[Sequence[Bucket]], AsyncGenerator[None]]
"""Fills the memory of each bucket in order and yields after each."""


class ReceiveBuffer:
    """Memory for one version, filled in buckets.

    Args:
        bucket_bytes: most bytes in a bucket.

    Attributes:
        pulled_nbytes: bytes that the last `fill` requested, including padding.
        verify_seconds: seconds that the last `fill` spent on digests.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._held: dict[str, TensorEntry] = {}
        self.pulled_nbytes = 0
        self.verify_seconds = 0.0

    async def fill(self, manifest: Manifest, pull: Pull, deadline: Deadline) -> list[WeightTensor]:
        """Get every tensor of the manifest, verified. After a failure, verified tensors are kept.

        Raises:
            WeightSyncError: a digest differs, or the deadline passed. Errors of `pull` propagate.
        """
        began = time.monotonic()
        missing = await self._keep(manifest, deadline)
        self.verify_seconds = time.monotonic() - began
        buckets = list(split_into_buckets(missing, self._memory, self._bucket_bytes))
        self.pulled_nbytes = sum(bucket.memory.nbytes for bucket in buckets)
        check = _Check(manifest.version, missing)
        filled = 0
        pacer = Pacer(deadline)
        async with aclosing(pull(buckets)) as pulled:
            async for _ in pulled:
                bucket, filled = buckets[filled], filled + 1
                began = time.monotonic()
                for start, piece in blocks(bucket.memory):
                    for entry in check.advance(bucket.start + start, piece):
                        self._held[entry.name] = entry
                    await pacer.advance(piece.nbytes)
                self.verify_seconds += time.monotonic() - began
        for entry in check.advance(manifest.payload_nbytes, memoryview(b"")):
            self._held[entry.name] = entry
        assert len(self._held) == len(manifest.tensors), "every tensor was checked"
        return [
            WeightTensor(entry.name, entry.dtype, entry.shape, self._memory[entry.offset : entry.end])
            for entry in manifest.tensors
        ]

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """The memory of the buckets; replaced only when it is too small."""
        return self._memory

    def forget(self) -> None:
        """Request every tensor in the next `fill`."""
        self._held.clear()

    def clear(self) -> None:
        """Drop the memory; tensors returned earlier keep it alive."""
        self._memory = np.empty(0, np.uint8)
        self._held.clear()

    async def _keep(self, manifest: Manifest, deadline: Deadline) -> list[TensorEntry]:
        """Keep the verified tensors of this manifest and return the missing ones, in order."""
        if self._memory.nbytes < manifest.payload_nbytes:
            self.clear()
            self._memory = np.empty(manifest.payload_nbytes, np.uint8)
        held, self._held = self._held, {}
        pacer = Pacer(deadline)
        for entry in manifest.tensors:
            if held.get(entry.name) == entry:
                data = self._memory[entry.offset : entry.end].data
                if tensor_digest(data) == entry.digest:
                    self._held[entry.name] = entry
                await pacer.advance(entry.nbytes)
        return [entry for entry in manifest.tensors if entry.name not in self._held]


def receiving(manifest: Manifest, timeout_s: float, engine: str) -> Deadline:
    """The deadline of receiving a version with that engine."""
    peer = f"process {os.getpid()}, engine {engine}"
    return Deadline(timeout_s, f"Receiving version {manifest.version}", peer)


def require_received(manifest: Manifest, last: Manifest | None) -> None:
    """Check that the version is the one received last.

    Raises:
        WeightSyncError: it is not.
    """
    if last is None or last.sync_id != manifest.sync_id:
        raise WeightSyncError(f"Version {manifest.version} was not received here; nothing can be confirmed.")


def split_into_buckets(
    entries: Sequence[TensorEntry], memory: npt.NDArray[np.uint8], bucket_bytes: int
) -> Iterator[Bucket]:
    """Split the ranges of these tensors into buckets.

    Neighbors share a bucket, including the padding between them; a large tensor takes several
    buckets.
    """
    for start, end in _runs(entries):
        for at in range(start, end, bucket_bytes):
            stop = min(at + bucket_bytes, end)
            yield Bucket(at, memory[at:stop].data)


class _Check:
    """Verifies the digests of tensors while their bytes arrive in order."""

    def __init__(self, version: int, entries: Sequence[TensorEntry]) -> None:
        self._version = version
        self._entries = list(reversed(entries))
        self._digest = TensorDigest()

    def advance(self, start: int, piece: memoryview) -> Iterator[TensorEntry]:
        """Add the bytes from `start` on and yield the tensors that end within them.

        Raises:
            WeightSyncError: a tensor is damaged.
        """
        stop = start + piece.nbytes
        while self._entries and (entry := self._entries[-1]).offset <= stop:
            self._digest.update(piece[max(entry.offset - start, 0) : max(entry.end - start, 0)])
            if entry.end > stop:
                return
            if (digest := self._digest.digest()) != entry.digest:
                raise damaged(entry, self._version, digest)
            yield self._entries.pop()


def _runs(entries: Sequence[TensorEntry]) -> Iterator[tuple[int, int]]:
    """First byte and end of each run of neighboring tensors, with only padding between them."""
    start = end = 0
    for entry in entries:
        if not entry.nbytes:
            continue
        if end and entry.offset - end < ALIGN:
            end = entry.end
            continue
        if end:
            yield start, end
        start, end = entry.offset, entry.end
    if end:
        yield start, end
