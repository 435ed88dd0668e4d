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

import msgspec
import numpy as np
import numpy.typing as npt

from rl_ckpt_engine.payload.block_stream import CHUNK_BYTES, Deadline, Pacer, damaged
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
        check: hashes the bytes of all buckets, in order; None: nothing does.
    """

    def __init__(self, start: int, memory: memoryview, check: _Hasher | None = None) -> None:
        self.start = start
        self.memory = memory
        self._check = check
        self._verified = 0

    def verify(self, end: int) -> None:
        """Hash the bytes before `end` that have not been hashed yet; all of them have arrived.

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
        prefetched_nbytes: bytes that the last `fill` had from `prefetch`.
        verify_seconds: seconds that the last `fill` spent on digests.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._held: dict[str, TensorEntry] = {}
        self._prefetched: dict[str, TensorEntry] = {}
        self._user: weakref.ref[Hold] | None = None
        self.pulled_nbytes = 0
        self.prefetched_nbytes = 0
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

        def arrived(entry: TensorEntry, digest: bytes) -> None:
            if digest != entry.digest:
                raise damaged(entry, manifest.version, digest)
            self._held[entry.name] = entry

        check = _Hasher(missing, arrived)
        buckets = list(split_into_buckets(missing, self._memory, self._bucket_bytes, check))
        self.pulled_nbytes = sum(bucket.memory.nbytes for bucket in buckets)
        await _pull_all(buckets, pull, deadline)
        check.advance(manifest.payload_nbytes, memoryview(b""))
        self.verify_seconds += check.seconds
        assert len(self._held) == len(manifest.tensors), "every tensor was checked"
        return self.tensors(manifest)

    def tensors(self, manifest: Manifest) -> list[WeightTensor]:
        """The tensors of the manifest, as views of this memory."""
        return [
            WeightTensor(entry.name, entry.dtype, entry.shape, self._memory[entry.offset : entry.end])
            for entry in manifest.tensors
        ]

    async def prefetch(
        self, expected: Sequence[TensorEntry], payload_nbytes: int, pull: Pull, deadline: Deadline
    ) -> None:
        """Get tensors of a version whose manifest does not exist yet.

        Args:
            expected: tensors of the version before, by offset; those of the new version are
                expected at the same places. Their digests are ignored.
            payload_nbytes: expected size of the payload.
            pull: fills the buckets in order; may end early.
            deadline: of the prefetch.

        Raises:
            WeightSyncError: the deadline passed. Errors of `pull` propagate.
        """
        self.reserve(payload_nbytes)
        self._prefetched.clear()
        for entry in expected:
            self._held.pop(entry.name, None)

        def arrived(entry: TensorEntry, digest: bytes) -> None:
            self._prefetched[entry.name] = msgspec.structs.replace(entry, digest=digest)

        bucket_bytes = min(self._bucket_bytes, CHUNK_BYTES)  # so that also a small model overlaps
        buckets = split_into_buckets(expected, self._memory, bucket_bytes, _Hasher(expected, arrived))
        await _pull_all(list(buckets), pull, deadline)

    def take_prefetched(self, manifest: Manifest) -> dict[str, TensorEntry]:
        """The prefetched tensors that are those of the manifest; the others are forgotten."""
        prefetched, self._prefetched = self._prefetched, {}
        taken = {entry.name: entry for entry in manifest.tensors if prefetched.get(entry.name) == entry}
        self.prefetched_nbytes = sum(entry.nbytes for entry in taken.values())
        return taken

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """The memory of the buckets; replaced only when it is too small."""
        return self._memory

    def forget(self) -> None:
        """Request every tensor in the next `fill`."""
        self._held.clear()
        self._prefetched.clear()

    def clear(self) -> None:
        """Drop the memory; tensors returned earlier keep it alive."""
        self._memory = np.empty(0, np.uint8)
        self.forget()

    async def _keep(self, manifest: Manifest, deadline: Deadline) -> list[TensorEntry]:
        """Keep the verified tensors of this manifest and return the missing ones, in order."""
        self.reserve(manifest.payload_nbytes)
        held, self._held = self._held, self.take_prefetched(manifest)
        pacer = Pacer(deadline)
        for entry in manifest.tensors:
            if entry.name not in self._held and held.get(entry.name) == entry:
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
    entries: Sequence[TensorEntry], memory: npt.NDArray[np.uint8], bucket_bytes: int, check: _Hasher | None = None
) -> Iterator[Bucket]:
    """Split the ranges of these tensors into buckets.

    Neighbors share a bucket, including the padding between them; a large tensor takes several
    buckets.
    """
    for start, end in _runs(entries):
        for at in range(start, end, bucket_bytes):
            stop = min(at + bucket_bytes, end)
            yield Bucket(at, memory[at:stop].data, check)


async def _pull_all(buckets: Sequence[Bucket], pull: Pull, deadline: Deadline) -> None:
    """Fill the buckets and hash what `pull` has not hashed; `pull` may end early."""
    pacer = Pacer(deadline)
    left = iter(buckets)
    async with aclosing(pull(buckets)) as pulled:
        async for _ in pulled:
            bucket = next(left)
            for start, piece in blocks(bucket.memory):
                bucket.verify(start + piece.nbytes)
                await pacer.advance(piece.nbytes)


class _Hasher:
    """Computes the digests of tensors while their bytes arrive in order.

    Args:
        entries: the tensors that arrive.
        arrived: called with each tensor that is complete, and its digest.

    Attributes:
        seconds: time spent on digests.
    """

    def __init__(self, entries: Sequence[TensorEntry], arrived: Callable[[TensorEntry, bytes], None]) -> None:
        self._entries = list(reversed(entries))
        self._arrived = arrived
        self._digest = TensorDigest()
        self.seconds = 0.0

    def advance(self, start: int, piece: memoryview) -> None:
        """Add the bytes from `start` on; errors of `arrived` propagate."""
        began = time.monotonic()
        self._advance(start, piece)
        self.seconds += time.monotonic() - began

    def _advance(self, start: int, piece: memoryview) -> None:
        stop = start + piece.nbytes
        while self._entries and (entry := self._entries[-1]).offset <= stop:
            self._digest.update(piece[max(entry.offset - start, 0) : max(entry.end - start, 0)])
            if entry.end > stop:
                return
            self._arrived(self._entries.pop(), self._digest.digest())


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
