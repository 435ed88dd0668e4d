"""Weights on their way into the engine's process: checked as a whole, then handed over in buckets of shared memory. No pickle."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from rl_protocol.errors import WeightSyncError
from rl_protocol.weights import WeightTensor
from rl_rollout_vllm.checkpoint import EMBEDDING, HEAD, Checkpoint

DIGEST = xxhash.xxh3_128
"""What both ends compute of the tensors of a bucket, one after the other, without what lies between them."""

_FLOATS = ("float32", "bfloat16", "float16")
_ALIGNMENT = 64
_CHUNK = 1 << 20
"""Bytes that are copied and then digested while they are in the cache."""

Entry = tuple[str, str, tuple[int, ...], int, int]
"""Name, element type, shape, offset and number of bytes of a tensor in a bucket."""

Answer = tuple[str, list[int]]
"""A worker's to a bucket: the DIGEST of what it read, and the inodes of the memory that it still holds tensors of."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Weights in memory that another process of this host may map.

    Attributes:
        inode: names the memory to whoever has mapped it.
        path: to be opened by that process.
        entries: what lies in it.
        digest: DIGEST of what was sent, in hex: whoever maps it compares before it believes a byte.
    """

    inode: int
    path: str
    entries: tuple[Entry, ...]
    digest: str


def checked(weights: Iterable[WeightTensor], model: Checkpoint, version: int) -> list[WeightTensor]:
    """The weights, when they are those of the model, no more and no less; a tied head that was left out is added.

    vLLM on CPU keeps a prepacked copy of the head, which stays as it was unless `lm_head.weight` arrives by name.

    Raises:
        WeightSyncError: a name, shape or element type that does not fit, or a name that is missing or comes twice.
    """
    found = list(weights)
    given = {weight.name: weight for weight in found}
    if len(given) != len(found):
        raise WeightSyncError(
            f"Weights of version {version} name a tensor twice; got {len(found)} of {len(given)} names."
        )
    if model.tied and HEAD not in given and EMBEDDING in given:
        given[HEAD] = replace(given[EMBEDDING], name=HEAD)
    shapes = dict(model.shapes)
    if model.tied:
        if EMBEDDING not in shapes:
            raise WeightSyncError(
                f"{model.path} ties its head to an embedding that is not called {EMBEDDING!r}; its updates would leave the head as it was."
            )
        shapes[HEAD] = shapes[EMBEDDING]
    missing, unknown = sorted(shapes.keys() - given.keys()), sorted(given.keys() - shapes.keys())
    if missing or unknown:
        raise WeightSyncError(
            f"Weights of version {version} do not fit the rollout model {model.path}: missing {missing[:4]}, unknown {unknown[:4]}."
        )
    for name, weight in given.items():
        if weight.shape != shapes[name] or weight.dtype not in _FLOATS:
            raise WeightSyncError(
                f"Weight {name!r} of version {version} is {weight.dtype} {weight.shape}; the rollout model wants one of "
                f"{', '.join(_FLOATS)} and {shapes[name]}."
            )
    return list(given.values())


def split(weights: Sequence[WeightTensor], bucket_bytes: int) -> Iterator[list[WeightTensor]]:
    """The weights in their order, in lists of at most that many bytes; a larger tensor is a list of its own."""
    bucket: list[WeightTensor] = []
    used = 0
    for weight in weights:
        if bucket and used + _room(weight) > bucket_bytes:
            yield bucket
            bucket, used = [], 0
        bucket.append(weight)
        used += _room(weight)
    if bucket:
        yield bucket


class Buckets:
    """Anonymous shared memory that weights are copied into, used again from bucket to bucket and from update to update.

    vLLM keeps tensors until it has all of a layer: memory that were written again meanwhile would change them under its hands. So memory that
    was filled is filled again when all workers have answered that they hold nothing of it; until then buckets go to other memory. What is
    kept is the most that was in use at once. It goes with `close`, or with this process, however that ends.

    Args:
        nbytes: of a bucket; one larger tensor makes a larger one.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._arenas: list[_Arena] = []
        self._unanswered: list[int] = []
        self._held: frozenset[int] = frozenset()

    def fill(self, weights: Sequence[WeightTensor]) -> Bucket:
        """Copy the weights into memory that nobody holds."""
        entries: list[Entry] = []
        used = 0
        for weight in weights:
            entries.append((weight.name, weight.dtype, weight.shape, used, weight.nbytes))
            used += _room(weight)
        arena = self._free(used)
        self._unanswered.append(arena.inode)
        digest = DIGEST()
        for weight, (_, _, _, offset, nbytes) in zip(weights, entries, strict=True):
            for begin in range(0, nbytes, _CHUNK):
                chunk = weight.data[begin : begin + _CHUNK]
                arena.memory[offset + begin : offset + begin + len(chunk)] = chunk
                digest.update(chunk.data)
        return Bucket(arena.inode, f"/proc/{os.getpid()}/fd/{arena.fd}", tuple(entries), digest.hexdigest())

    def answered(self, bucket: Bucket, held: Iterable[int]) -> None:
        """All workers have answered to a bucket, so they are done with those before, too, and hold this memory of them, by inode."""
        self._held = frozenset(held)
        del self._unanswered[: self._unanswered.index(bucket.inode) + 1]

    def close(self) -> None:
        """Give all memory back; what another process has mapped lives until it lets go. The next `fill` starts anew."""
        for arena in self._arenas:
            os.close(arena.fd)
        self._arenas, self._unanswered, self._held = [], [], frozenset()

    def _free(self, nbytes: int) -> _Arena:
        for arena in self._arenas:
            if arena.inode not in self._held and arena.inode not in self._unanswered and len(arena.memory) >= nbytes:
                return arena
        self._arenas.append(_arena(max(nbytes, self._nbytes)))
        return self._arenas[-1]


@dataclass(frozen=True, slots=True)
class _Arena:
    """Memory of one bucket; `inode` names it to whoever has mapped it."""

    fd: int
    inode: int
    memory: NDArray[np.uint8]


def _arena(nbytes: int) -> _Arena:
    fd = os.memfd_create("rl-rollout-vllm")
    try:
        os.ftruncate(fd, nbytes)
        return _Arena(fd, os.fstat(fd).st_ino, np.frombuffer(mmap.mmap(fd, nbytes), np.uint8))
    except BaseException:
        os.close(fd)
        raise


def _room(weight: WeightTensor) -> int:
    return -(-weight.nbytes // _ALIGNMENT) * _ALIGNMENT
