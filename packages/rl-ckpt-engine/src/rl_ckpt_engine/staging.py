"""Receiver's side of engines that copy: memory for one version, filled in buckets, kept between syncs.

Tensors are known by name, place and digest. One that is there already, from a sync that broke off or from the version before, is not asked
for again: so a sync that is repeated goes on where the former one stopped, and frozen weights travel once. It is compared with its digest all
the same.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl_ckpt_engine.digests import TensorDigest, blocks, tensor_digest
from rl_ckpt_engine.manifest import ALIGN, Manifest, TensorEntry
from rl_ckpt_engine.stream import Deadline, Pacer, damaged
from rl_protocol.weights import WeightTensor


@dataclass(frozen=True, slots=True)
class Bucket:
    """A run of the payload that is still missing, and the memory it belongs in."""

    start: int
    """First byte, counted from the start of the payload."""
    memory: memoryview


Pull = Callable[[Sequence[Bucket]], AsyncGenerator[None]]
"""Fills the memory of each bucket in turn, and yields after each."""


class Staging:
    """See the module's docstring.

    Args:
        bucket_bytes: most bytes in a bucket.

    Attributes:
        pulled_nbytes: bytes that the last `fill` asked for, padding included.
        verify_seconds: what it spent on digests.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._held: dict[str, TensorEntry] = {}
        self.pulled_nbytes = 0
        self.verify_seconds = 0.0

    async def fill(self, manifest: Manifest, pull: Pull, deadline: Deadline) -> list[WeightTensor]:
        """Every tensor of the manifest, verified; what was verified stays when this breaks off.

        Raises:
            WeightSyncError: a digest does not fit, or the deadline passed; also whatever `pull` raises.
        """
        began = time.monotonic()
        missing = await self._keep(manifest, deadline)
        self.verify_seconds = time.monotonic() - began
        buckets = list(cut(missing, self._memory, self._bucket_bytes))
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
        """Where buckets are: the same array while it is large enough."""
        return self._memory

    def forget(self) -> None:
        """Ask for everything next time."""
        self._held.clear()

    def clear(self) -> None:
        """Drop the memory; tensors handed out keep it."""
        self._memory = np.empty(0, np.uint8)
        self._held.clear()

    async def _keep(self, manifest: Manifest, deadline: Deadline) -> list[TensorEntry]:
        """Forget what this manifest does not have; what remains missing, in order."""
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


def cut(entries: Sequence[TensorEntry], memory: npt.NDArray[np.uint8], bucket_bytes: int) -> Iterator[Bucket]:
    """The parts of a payload that hold these tensors. Neighbours share a bucket, padding between them included; a tensor that is larger than
    a bucket takes several."""
    for start, end in _runs(entries):
        for at in range(start, end, bucket_bytes):
            stop = min(at + bucket_bytes, end)
            yield Bucket(at, memory[at:stop].data)


class _Check:
    """Compares tensors with their digests while their bytes come by in order."""

    def __init__(self, version: int, entries: Sequence[TensorEntry]) -> None:
        self._version = version
        self._entries = list(reversed(entries))
        self._digest = TensorDigest()

    def advance(self, start: int, piece: memoryview) -> Iterator[TensorEntry]:
        """The tensors that end within the bytes from `start` on.

        Raises:
            WeightSyncError: one of them is damaged.
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
    """First byte and end of each run of neighbours: between them is padding alone."""
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
