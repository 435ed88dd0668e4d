"""Moving and hashing bytes in blocks: deadlines are met and the event loop stays alive.

Sources are read in the calling thread, since one on a GPU would find itself on the wrong device elsewhere. Other threads help with blocks
while the caller waits for them (see crew): none is left that could write into memory which was given to the next version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from typing import Protocol

from rl_ckpt_engine.crew import Crew
from rl_ckpt_engine.digests import BLOCK_BYTES, blocks, combined, digest_of
from rl_ckpt_engine.manifest import Manifest, TensorEntry, plan
from rl_protocol.errors import WeightSyncError
from rl_protocol.weights import WeightTensor

CHUNK_BYTES = 16 << 20
"""Most bytes touched before others run: a few milliseconds."""


class Deadline:
    """A time limit of one phase with one peer, which another call may also cut short.

    Args:
        timeout_s: seconds from now.
        phase: what is being done, for the message.
        peer: with whom, for the message.
    """

    def __init__(self, timeout_s: float, phase: str, peer: str) -> None:
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        self._what = f"{phase} ({peer})"
        self._cancelled = ""

    def cancel(self, reason: str) -> None:
        """Make the next `check` fail."""
        self._cancelled = reason

    @property
    def left_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def timeout(self) -> asyncio.Timeout:
        """A context in which waiting ends with TimeoutError when the time is over."""
        return asyncio.timeout(self.left_s)

    def check(self) -> None:
        """Go on, or not.

        Raises:
            WeightSyncError: the time is over, or `cancel` was called.
        """
        if self._cancelled:
            raise WeightSyncError(f"{self._what} was stopped: {self._cancelled}.")
        if time.monotonic() >= self._end:
            raise WeightSyncError(
                f"{self._what} did not finish within {self._timeout_s} s; raise checkpoint_engine.timeout_s or look at the peer."
            )


class Target(Protocol):
    """Takes the tensors of one version."""

    unordered: bool
    """Pieces of a tensor may come in any order and from several threads at once."""

    def start(self, weight: WeightTensor, offset: int) -> None:
        """A tensor that begins at that byte of the payload comes next."""
        ...

    def write(self, offset: int, piece: memoryview) -> None:
        """A piece of it, at that byte of the payload; pieces come in order unless `unordered`."""
        ...


class Pacer:
    """Counts bytes, and every CHUNK_BYTES lets others run and looks at the clock."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._since = 0

    async def advance(self, nbytes: int) -> None:
        """Account for work done.

        Raises:
            WeightSyncError: see Deadline.check.
        """
        self._since += nbytes
        if self._since >= CHUNK_BYTES:
            self._since = 0
            await asyncio.sleep(0)
        self._deadline.check()


async def emit(weights: Iterable[WeightTensor], target: Target, deadline: Deadline) -> tuple[TensorEntry, ...]:
    """Hash every tensor and hand its bytes, block by block, to `target`.

    Raises:
        WeightSyncError: no tensor, a name twice, the deadline passed; also whatever `weights` and `target` raise.
    """
    entries: list[TensorEntry] = []
    pacer = Pacer(deadline)
    deadline.check()
    with Crew() as crew:
        for weight, offset in plan(weights):
            target.start(weight, offset)
            digests: list[bytes] = []
            for start in range(0, weight.nbytes, CHUNK_BYTES):
                chunk = weight.data.data[start : start + CHUNK_BYTES]
                digests += _take(chunk, offset + start, target, crew)
                await pacer.advance(chunk.nbytes)
            digest = combined(digests)
            entries.append(TensorEntry(weight.name, weight.dtype, weight.shape, offset, weight.nbytes, digest))
            deadline.check()
    if not entries:
        raise WeightSyncError("The source of the weights yielded no tensor; a version can't be empty.")
    return tuple(entries)


def _take(chunk: memoryview, offset: int, target: Target, crew: Crew) -> list[bytes]:
    """Write the blocks of a chunk, and hash each while it is in the cache; returns their digests."""
    parts = list(blocks(chunk))

    def take(number: int) -> bytes:
        start, block = parts[number]
        target.write(offset + start, block)
        return digest_of(block)

    return crew.map(take, len(parts)) if target.unordered else [take(number) for number in range(len(parts))]


async def verify(manifest: Manifest, weights: Iterable[WeightTensor], deadline: Deadline) -> float:
    """Compare the digest of every tensor with the manifest's; returns the seconds it took.

    Raises:
        WeightSyncError: names the first tensor that differs; or the deadline passed.
    """
    start = time.monotonic()
    pacer = Pacer(deadline)
    deadline.check()
    digests: list[list[bytes]] = [[] for _ in manifest.tensors]
    with Crew() as crew:
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
    """The blocks of all tensors, each with the number of its tensor, in lists of about CHUNK_BYTES."""
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
    """The error for a tensor whose bytes are not those that were sent."""
    return WeightSyncError(
        f"Tensor {entry.name!r} of version {version} arrived damaged: its digest is {digest.hex()}, "
        f"the sender's {entry.digest.hex()}. The active weights stay; send the version again."
    )
