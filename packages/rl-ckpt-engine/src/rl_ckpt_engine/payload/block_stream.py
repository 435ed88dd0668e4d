"""Copy and hash tensors in blocks, with deadlines and without blocking the event loop for long.

Sources are read in the calling thread, because another thread may have another current GPU. Helper
threads (see thread_team) work only while the caller waits, so none can write into memory that is
reused later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from rl_ckpt_engine.payload.digests import blocks, combined, digest_of
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

    def start(self, weight: WeightTensor, offset: int) -> bool:
        """Start the next tensor, at that byte of the payload; returns whether its bytes must be
        written.

        If `unordered`, pieces of earlier tensors may be written later.
        """
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


async def emit(
    weights: Iterable[WeightTensor], target: Target, deadline: Deadline, written: Callable[[int], None] | None = None
) -> tuple[TensorEntry, ...]:
    """Write every tensor to `target`, block by block, and hash it.

    Args:
        weights: the tensors; iterated once, in the calling thread.
        target: gets the blocks.
        deadline: checked after each chunk.
        written: called after each chunk with the number of bytes, from the start of the payload,
            that have been written.

    Returns:
        The manifest entries of the tensors.

    Raises:
        WeightSyncError: there is no tensor, a name occurs twice, or the deadline passed. Errors of
            `weights` and `target` propagate.
    """
    entries: list[TensorEntry] = []
    digests: list[list[bytes]] = []
    pacer = Pacer(deadline)
    deadline.check()

    def started() -> Iterator[_Tensor]:
        for weight, offset in plan(weights):
            deadline.check()
            entries.append(TensorEntry(weight.name, weight.dtype, weight.shape, offset, weight.nbytes, b""))
            digests.append([])
            yield _Tensor(offset, weight.data.data, target.start(weight, offset))

    with ThreadTeam() as crew:
        for batch in _batches(started(), apart=not target.unordered):
            size = _take(batch, target, crew, digests)
            if written is not None:
                written(batch[-1].offset + batch[-1].data.nbytes)
            await pacer.advance(size)
    if not entries:
        raise WeightSyncError("The source of the weights yielded no tensor; a version needs at least one.")
    deadline.check()
    return tuple(
        msgspec.structs.replace(entry, digest=combined(found)) for entry, found in zip(entries, digests, strict=True)
    )


def _take(batch: Sequence[_Block], target: Target, crew: ThreadTeam, digests: list[list[bytes]]) -> int:
    """Write the blocks and hash each while it is in the cache; returns their size."""

    def take(number: int) -> bytes:
        block = batch[number]
        if block.move:
            target.write(block.offset, block.data)
        return digest_of(block.data)

    found = crew.map(take, len(batch)) if target.unordered else [take(number) for number in range(len(batch))]
    return _collect(batch, found, digests)


async def verify(
    manifest: Manifest,
    weights: Iterable[WeightTensor],
    deadline: Deadline,
    copy: npt.NDArray[np.uint8] | None = None,
    skip: Collection[str] = (),
) -> float:
    """Compare the digest of every tensor with the manifest.

    Args:
        manifest: has the digests.
        weights: the tensors of the manifest, in its order.
        deadline: checked after each chunk.
        copy: uint8 [payload_nbytes]. If given, each tensor is copied to its offset, and the digests
            are those of the copy; a block is hashed while it is in the cache.
        skip: names of tensors that need neither.

    Returns:
        The seconds it took.

    Raises:
        WeightSyncError: a tensor differs (names the first one), or the deadline passed.
    """
    start = time.monotonic()
    pacer = Pacer(deadline)
    deadline.check()
    wanted = [
        (entry, weight) for entry, weight in zip(manifest.tensors, weights, strict=True) if entry.name not in skip
    ]
    digests: list[list[bytes]] = [[] for _ in wanted]
    tensors = (_Tensor(entry.offset, weight.data.data) for entry, weight in wanted)
    with ThreadTeam() as crew:
        for batch in _batches(tensors):

            def check(number: int, batch: Sequence[_Block] = batch) -> bytes:
                block = batch[number]
                return digest_of(block.data if copy is None else _copied(block, copy))

            await pacer.advance(_collect(batch, crew.map(check, len(batch)), digests))
    for (entry, _), found in zip(wanted, digests, strict=True):
        if (digest := combined(found)) != entry.digest:
            raise damaged(entry, manifest.version, digest)
    deadline.check()
    return time.monotonic() - start


class _Tensor(NamedTuple):
    """A tensor to move."""

    offset: int
    """In the payload."""
    data: memoryview
    move: bool = True
    """False: its bytes are where they belong already, and are only hashed."""


class _Block(NamedTuple):
    """A block of a tensor."""

    tensor: int
    """Number of the tensor."""
    offset: int
    """In the payload."""
    data: memoryview
    move: bool


def _batches(tensors: Iterable[_Tensor], *, apart: bool = False) -> Iterator[Sequence[_Block]]:
    """All blocks of the tensors, in lists of at most CHUNK_BYTES.

    Blocks of several tensors share a list unless `apart`.
    """
    batch: list[_Block] = []
    size = 0
    for number, tensor in enumerate(tensors):
        for start, data in blocks(tensor.data):
            if size + data.nbytes > CHUNK_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(_Block(number, tensor.offset + start, data, tensor.move))
            size += data.nbytes
        if apart and batch:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _collect(batch: Sequence[_Block], found: Sequence[bytes], digests: list[list[bytes]]) -> int:
    """Append the digests of the blocks to those of their tensors; returns the size of the
    blocks."""
    for block, digest in zip(batch, found, strict=True):
        digests[block.tensor].append(digest)
    return sum(block.data.nbytes for block in batch)


def _copied(block: _Block, payload: npt.NDArray[np.uint8]) -> memoryview:
    """Copy the block to its offset in the payload and return the copy."""
    target = payload[block.offset : block.offset + block.data.nbytes]
    np.copyto(target, np.frombuffer(block.data, np.uint8))
    return target.data


def damaged(entry: TensorEntry, version: int, digest: bytes) -> WeightSyncError:
    """The error for a tensor whose bytes differ from those sent."""
    return WeightSyncError(
        f"Tensor {entry.name!r} of version {version} arrived damaged: its digest is {digest.hex()}, "
        f"the sender's {entry.digest.hex()}. The active weights stay; send the version again."
    )
