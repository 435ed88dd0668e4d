"""Copy and hash tensors in blocks, with deadlines and without blocking the event loop for long.

Sources are read in the calling thread, because another thread may have another current GPU. Helper
threads (see thread_team) work only while the caller waits, so none can write into memory that is
reused later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from typing import Protocol

from rl_ckpt_engine.payload.digests import BLOCK_BYTES, blocks, combined, digest_of
from rl_ckpt_engine.payload.manifest import Manifest, TensorEntry, plan
from rl_ckpt_engine.payload.thread_team import ThreadTeam
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError

CHUNK_BYTES = 16 << 20
"""Most bytes processed before yielding to the event loop: a few milliseconds."""


class Deadline:
    """The time limit of one phase, which can also be cancelled.

    Args:
        timeout_s: seconds from now.
        phase: the phase, for messages.
        peer: the peer, for messages.
    """

    def __init__(self, timeout_s: float, phase: str, peer: str) -> None:
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        self._what = f"{phase} ({peer})"
        self._cancelled = ""

    def cancel(self, reason: str) -> None:
        """Make the next `check` raise."""
        self._cancelled = reason

    @property
    def left_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def timeout(self) -> asyncio.Timeout:
        """A context manager that raises TimeoutError at the deadline."""
        return asyncio.timeout(self.left_s)

    def check(self) -> None:
        """Raise if the phase must stop.

        Raises:
            WeightSyncError: the deadline passed, or `cancel` was called.
        """
        if self._cancelled:
            raise WeightSyncError(f"{self._what} was stopped: {self._cancelled}.")
        if time.monotonic() >= self._end:
            raise WeightSyncError(
                f"{self._what} did not finish within {self._timeout_s} s; raise CheckpointEngineConfig.timeout_s or check the peer."
            )


class Target(Protocol):
    """Receives the tensors of one version."""

    unordered: bool
    """Whether the pieces of a tensor may be written in any order and by several threads."""

    def start(self, weight: WeightTensor, offset: int) -> None:
        """Start the next tensor, at that byte of the payload."""
        ...

    def write(self, offset: int, piece: memoryview) -> None:
        """Write a piece of the tensor at that byte of the payload, in order unless `unordered`."""
        ...


class Pacer:
    """Counts processed bytes, yields to the event loop every CHUNK_BYTES and checks the
    deadline."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._since = 0

    async def advance(self, nbytes: int) -> None:
        """Account for processed bytes.

        Raises:
            WeightSyncError: see Deadline.check.
        """
        self._since += nbytes
        if self._since >= CHUNK_BYTES:
            self._since = 0
            await asyncio.sleep(0)
        self._deadline.check()


async def emit(weights: Iterable[WeightTensor], target: Target, deadline: Deadline) -> tuple[TensorEntry, ...]:
    """Write every tensor to `target`, block by block, and hash it.

    Returns:
        The manifest entries of the tensors.

    Raises:
        WeightSyncError: there is no tensor, a name occurs twice, or the deadline passed. Errors of
            `weights` and `target` propagate.
    """
    entries: list[TensorEntry] = []
    pacer = Pacer(deadline)
    deadline.check()
    with ThreadTeam() as crew:
        for weight, offset in plan(weights):
            target.start(weight, offset)
            data, nbytes = weight.data.data, weight.nbytes
            digests: list[bytes] = []
            for start in range(0, nbytes, CHUNK_BYTES):
                chunk = data[start : start + CHUNK_BYTES]
                digests += _take(chunk, offset + start, target, crew)
                await pacer.advance(chunk.nbytes)
            entries.append(TensorEntry(weight.name, weight.dtype, weight.shape, offset, nbytes, combined(digests)))
            deadline.check()
    if not entries:
        raise WeightSyncError("The source of the weights yielded no tensor; a version needs at least one.")
    return tuple(entries)


def _take(chunk: memoryview, offset: int, target: Target, crew: ThreadTeam) -> list[bytes]:
    """Write the blocks of a chunk and hash each while it is in the cache; returns the digests."""
    parts = list(blocks(chunk))

    def take(number: int) -> bytes:
        start, block = parts[number]
        target.write(offset + start, block)
        return digest_of(block)

    return crew.map(take, len(parts)) if target.unordered else [take(number) for number in range(len(parts))]


async def verify(manifest: Manifest, weights: Iterable[WeightTensor], deadline: Deadline) -> float:
    """Compare the digest of every tensor with the manifest.

    Returns:
        The seconds it took.

    Raises:
        WeightSyncError: a tensor differs (names the first one), or the deadline passed.
    """
    start = time.monotonic()
    pacer = Pacer(deadline)
    deadline.check()
    digests: list[list[bytes]] = [[] for _ in manifest.tensors]
    with ThreadTeam() as crew:
        for batch in _batches(weights):
            found = crew.map(lambda number, batch=batch: digest_of(batch[number][1]), len(batch))
            for (tensor, _), digest in zip(batch, found, strict=True):
                digests[tensor].append(digest)
            await pacer.advance(sum(block.nbytes for _, block in batch))
    for entry, found in zip(manifest.tensors, digests, strict=True):
        if (digest := combined(found)) != entry.digest:
            raise damaged(entry, manifest.version, digest)
    deadline.check()
    return time.monotonic() - start


def _batches(weights: Iterable[WeightTensor]) -> Iterator[list[tuple[int, memoryview]]]:
    """All blocks, each with the number of its tensor, in lists of about CHUNK_BYTES."""
    batch: list[tuple[int, memoryview]] = []
    size = 0
    for number, weight in enumerate(weights):
        for _, block in blocks(weight.data.data):
            batch.append((number, block))
            size += block.nbytes
            if size > CHUNK_BYTES - BLOCK_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def damaged(entry: TensorEntry, version: int, digest: bytes) -> WeightSyncError:
    """The error for a tensor whose bytes differ from those sent."""
    return WeightSyncError(
        f"Tensor {entry.name!r} of version {version} arrived damaged: its digest is {digest.hex()}, "
        f"the sender's {entry.digest.hex()}. The active weights stay; send the version again."
    )
