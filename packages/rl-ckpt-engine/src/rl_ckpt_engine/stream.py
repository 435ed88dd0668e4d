"""Moving and hashing bytes in pieces: deadlines are met and the event loop stays alive without any thread.

Threads are avoided on purpose: a copy that a cancelled call left running could write into memory that was given to the next version,
and a source on a GPU would find itself on the wrong device.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from typing import Protocol

import xxhash

from rl_ckpt_engine.manifest import Manifest, TensorEntry, plan
from rl_protocol.errors import WeightSyncError
from rl_protocol.weights import WeightTensor

CHUNK_BYTES = 16 << 20
"""Most bytes touched before others run: a few milliseconds."""
PIECE_BYTES = 512 << 10
"""Bytes hashed and then copied: the second pass finds them in the cache."""


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

    def start(self, weight: WeightTensor, offset: int) -> None:
        """A tensor that begins at that byte of the payload comes next."""
        ...

    def write(self, offset: int, piece: memoryview) -> None:
        """A piece of it, at that byte of the payload; pieces come in order."""
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


def chunks(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Pieces of at most PIECE_BYTES with their offsets."""
    for start in range(0, data.nbytes, PIECE_BYTES):
        yield start, data[start : start + PIECE_BYTES]


async def emit(weights: Iterable[WeightTensor], target: Target, deadline: Deadline) -> tuple[TensorEntry, ...]:
    """Hash every tensor and hand its bytes, in pieces, to `target`.

    Raises:
        WeightSyncError: no tensor, a name twice, the deadline passed; also whatever `weights` and `target` raise.
    """
    entries: list[TensorEntry] = []
    pacer = Pacer(deadline)
    deadline.check()
    for weight, offset in plan(weights):
        digest = xxhash.xxh3_128()
        target.start(weight, offset)
        for start, piece in chunks(weight.data.data):
            digest.update(piece)
            target.write(offset + start, piece)
            await pacer.advance(piece.nbytes)
        entries.append(TensorEntry(weight.name, weight.dtype, weight.shape, offset, weight.nbytes, digest.digest()))
        deadline.check()
    if not entries:
        raise WeightSyncError("The source of the weights yielded no tensor; a version can't be empty.")
    return tuple(entries)


async def verify(manifest: Manifest, weights: Iterable[WeightTensor], deadline: Deadline) -> None:
    """Compare the digest of every tensor with the manifest's, in order.

    Raises:
        WeightSyncError: names the first tensor that differs; or the deadline passed.
    """
    pacer = Pacer(deadline)
    deadline.check()
    for entry, weight in zip(manifest.tensors, weights, strict=True):
        digest = xxhash.xxh3_128()
        for _, piece in chunks(weight.data.data):
            digest.update(piece)
            await pacer.advance(piece.nbytes)
        if digest.digest() != entry.digest:
            raise damaged(entry, manifest.version, digest.digest())
        deadline.check()


def damaged(entry: TensorEntry, version: int, digest: bytes) -> WeightSyncError:
    """The error for a tensor whose bytes are not those that were sent."""
    return WeightSyncError(
        f"Tensor {entry.name!r} of version {version} arrived damaged: its digest is {digest.hex()}, "
        f"the sender's {entry.digest.hex()}. The active weights stay; send the version again."
    )
