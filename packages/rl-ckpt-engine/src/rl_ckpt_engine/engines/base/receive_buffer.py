"""ReceiveBuffer: a receiver's memory for one version, filled in buckets and kept between syncs.

A tensor that is already there, from a failed sync or from the previous version, is not requested
again: a repeated sync resumes where the last one failed, and frozen weights are sent once. Tensors
are identified by name, offset and digest, and reused ones are verified, too.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing

import numpy as np
import numpy.typing as npt

from rl_ckpt_engine.payload.block_stream import Deadline, Pacer, damaged
from rl_ckpt_engine.payload.digests import TensorDigest, blocks, tensor_digest
from rl_ckpt_engine.payload.manifest import ALIGN, Manifest, TensorEntry
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError
from rl_protocol.support.host.aligned_memory import aligned_bytes


class Bucket:
    """A missing range of the payload, and the memory to fill with it.

    Args:
        start: first byte, relative to the start of the payload.
        memory: the bytes to fill.
        check: verifies the bytes of all buckets, in order; None: nothing does.
    """

    def __init__(self, start: int, memory: memoryview, check: _Check | None = None) -> None:
        self.start = start
        self.memory = memory
        self._check = check
        self._verified = 0

    def verify(self, end: int) -> None:
        """Verify the bytes before `end` that have not been verified yet; all of them have arrived.

        The thread that fills the bucket may call this while the bytes are in the cache.

        Raises:
            WeightSyncError: a tensor is damaged.
        """
        if self._check is not None and end > self._verified:
            self._check.advance(self.start + self._verified, self.memory[self._verified : end])
            self._verified = end


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
        self._user: weakref.ref[Hold] | None = None
        self.pulled_nbytes = 0
        self.verify_seconds = 0.0

    @property
    def in_use(self) -> bool:
        """Whether a `hold` of this buffer is referenced."""
        return self._user is not None and self._user() is not None

    def hold(self) -> Hold:
        """Keep `ReceiveBuffers` from filling this buffer while the result is referenced."""
        held = None if self._user is None else self._user()
        if held is None:
            held = Hold()
            self._user = weakref.ref(held)
        return held

    def reserve(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """At least that much memory; it is replaced, and what it held forgotten, if it is too
        small."""
        if self._memory.nbytes < nbytes:
            self.clear()
            self._memory = aligned_bytes(nbytes)
        return self._memory

    async def fill(self, manifest: Manifest, pull: Pull, deadline: Deadline) -> list[WeightTensor]:
        """Get every tensor of the manifest, verified. After a failure, verified tensors are kept.

        Raises:
            WeightSyncError: a digest differs, or the deadline passed. Errors of `pull` propagate.
        """
        began = time.monotonic()
        missing = await self._keep(manifest, deadline)
        self.verify_seconds = time.monotonic() - began
        check = _Check(manifest.version, missing, self._held)
        buckets = list(split_into_buckets(missing, self._memory, self._bucket_bytes, check))
        self.pulled_nbytes = sum(bucket.memory.nbytes for bucket in buckets)
        filled = 0
        pacer = Pacer(deadline)
        async with aclosing(pull(buckets)) as pulled:
            async for _ in pulled:
                bucket, filled = buckets[filled], filled + 1
                for start, piece in blocks(bucket.memory):
                    bucket.verify(start + piece.nbytes)
                    await pacer.advance(piece.nbytes)
        check.advance(manifest.payload_nbytes, memoryview(b""))
        self.verify_seconds += check.seconds
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
        self.reserve(manifest.payload_nbytes)
        held, self._held = self._held, {}
        pacer = Pacer(deadline)
        for entry in manifest.tensors:
            if held.get(entry.name) == entry:
                data = self._memory[entry.offset : entry.end].data
                if tensor_digest(data) == entry.digest:
                    self._held[entry.name] = entry
                await pacer.advance(entry.nbytes)
        return [entry for entry in manifest.tensors if entry.name not in self._held]


class Hold:
    """Marks a buffer as in use while it is referenced.

    The `watch` of tensors in the receiver's own memory, which only the receiver overwrites.
    """

    def __call__(self) -> None:
        """Do nothing."""


class ReceiveBuffers:
    """The buffers of a receiver: a second one is filled while the first is in use.

    Args:
        bucket_bytes: see ReceiveBuffer.

    Attributes:
        current: the buffer filled last.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.current, self._other = ReceiveBuffer(bucket_bytes), ReceiveBuffer(bucket_bytes)
        self._bucket_bytes = bucket_bytes

    def next(self) -> ReceiveBuffer:
        """The buffer to fill next, which becomes the current one."""
        if self.current.in_use:
            self.current, self._other = self._other, self.current
        if self.current.in_use:  # a sink that failed midway may refer to both
            self.current = ReceiveBuffer(self._bucket_bytes)
        return self.current

    def clear(self) -> None:
        """Drop the memory; tensors returned earlier keep it alive."""
        self.current.clear()
        self._other.clear()


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
    entries: Sequence[TensorEntry], memory: npt.NDArray[np.uint8], bucket_bytes: int, check: _Check | None = None
) -> Iterator[Bucket]:
    """Split the ranges of these tensors into buckets.

    Neighbors share a bucket, including the padding between them; a large tensor takes several
    buckets.
    """
    for start, end in _runs(entries):
        for at in range(start, end, bucket_bytes):
            stop = min(at + bucket_bytes, end)
            yield Bucket(at, memory[at:stop].data, check)


class _Check:
    """Verifies the digests of tensors while their bytes arrive in order.

    Args:
        version: for messages.
        entries: the tensors that arrive.
        held: gets each verified tensor, by name.

    Attributes:
        seconds: time spent on digests.
    """

    def __init__(self, version: int, entries: Sequence[TensorEntry], held: dict[str, TensorEntry]) -> None:
        self._version = version
        self._entries = list(reversed(entries))
        self._held = held
        self._digest = TensorDigest()
        self.seconds = 0.0

    def advance(self, start: int, piece: memoryview) -> None:
        """Add the bytes from `start` on and verify the tensors that end within them.

        Raises:
            WeightSyncError: a tensor is damaged.
        """
        began = time.monotonic()
        self._advance(start, piece)
        self.seconds += time.monotonic() - began

    def _advance(self, start: int, piece: memoryview) -> None:
        stop = start + piece.nbytes
        while self._entries and (entry := self._entries[-1]).offset <= stop:
            self._digest.update(piece[max(entry.offset - start, 0) : max(entry.end - start, 0)])
            if entry.end > stop:
                return
            if (digest := self._digest.digest()) != entry.digest:
                raise damaged(entry, self._version, digest)
            self._held[entry.name] = self._entries.pop()


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
