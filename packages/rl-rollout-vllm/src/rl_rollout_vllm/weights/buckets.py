"""Check new weights against the model, and copy them into buckets of shared memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError
from rl_rollout_vllm.weights.checkpoint import HEAD, Checkpoint

DIGEST = xxhash.xxh3_128
"""Digest that both sides compute over the tensors of a bucket, without the padding in between."""

_FLOATS = ("float32", "bfloat16", "float16")
_ALIGNMENT = 64
_CHUNK = 1 << 20
"""Bytes copied at a time, then digested while they are in the cache."""

Entry = tuple[str, str, tuple[int, ...], int, int]
"""Name, element type, shape, offset and number of bytes of a tensor in a bucket."""

Answer = tuple[str, list[int]]
"""A worker's answer to a bucket: DIGEST of what it read, inodes of the memory it still uses."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Weights in shared memory that the workers on this host map.

    Attributes:
        inode: identifies the memory.
        path: path that the workers open.
        entries: the tensors in it.
        digest: DIGEST of the tensors in hex, which the workers compare before they use a byte.
    """

    inode: int
    path: str
    entries: tuple[Entry, ...]
    digest: str


def check_weights(weights: Iterable[WeightTensor], model: Checkpoint, version: int) -> list[WeightTensor]:
    """Check that the weights are exactly those of the model, and add a tied head if it is missing.

    vLLM on CPU keeps a prepacked copy of the head, which changes only if `lm_head.weight` is sent.

    Raises:
        WeightSyncError: a name is missing, unknown or repeated, or a shape or element type is
            wrong.
    """
    found = [replace(weight, name=model.weight_name(weight.name)) for weight in weights]
    given = {weight.name: weight for weight in found}
    if len(given) != len(found):
        raise WeightSyncError(
            f"Weights of version {version} name a tensor twice; got {len(found)} of {len(given)} names."
        )
    embedding = model.embedding
    if model.tied and HEAD not in given and embedding in given:
        given[HEAD] = replace(given[embedding], name=HEAD)
    shapes = dict(model.shapes)
    if model.tied:
        if embedding not in shapes:
            raise WeightSyncError(
                f"{model.path} ties its head to an embedding that is not called {embedding!r}; its updates would not reach the head."
            )
        shapes[HEAD] = shapes[embedding]
    missing, unknown = sorted(shapes.keys() - given.keys()), sorted(given.keys() - shapes.keys())
    if missing or unknown:
        raise WeightSyncError(
            f"Weights of version {version} do not fit the rollout model {model.path}: missing {missing[:4]}, unknown {unknown[:4]}."
        )
    for name, weight in given.items():
        if weight.shape != shapes[name] or weight.dtype not in _FLOATS:
            raise WeightSyncError(
                f"Weight {name!r} of version {version} is {weight.dtype} {weight.shape}; the rollout model needs one of "
                f"{', '.join(_FLOATS)} and {shapes[name]}."
            )
    return list(given.values())


def split(weights: Sequence[WeightTensor], bucket_bytes: int) -> Iterator[list[WeightTensor]]:
    """Split the weights into lists of at most that many bytes; a larger tensor is alone."""
    bucket: list[WeightTensor] = []
    used = 0
    for weight in weights:
        if bucket and used + _padded_bytes(weight) > bucket_bytes:
            yield bucket
            bucket, used = [], 0
        bucket.append(weight)
        used += _padded_bytes(weight)
    if bucket:
        yield bucket


class Buckets:
    """Anonymous shared memory for weights, reused between buckets and between updates.

    vLLM keeps tensors until it has all of a layer, so memory is filled again only after all workers
    have answered that they no longer use it; until then other memory is used. The peak is kept
    until `close`, or until this process ends in any way.

    Args:
        nbytes: size of a bucket; larger tensors get larger ones.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._arenas: list[_Arena] = []
        self._unanswered: list[int] = []
        self._held: frozenset[int] = frozenset()

    def fill(self, weights: Sequence[WeightTensor]) -> Bucket:
        """Copy the weights into memory that is not in use."""
        entries: list[Entry] = []
        used = 0
        for weight in weights:
            entries.append((weight.name, weight.dtype, weight.shape, used, weight.nbytes))
            used += _padded_bytes(weight)
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
        """Note that all workers have answered to a bucket.

        They are then done with all earlier ones, and use only the memory with the inodes in `held`.
        """
        self._held = frozenset(held)
        del self._unanswered[: self._unanswered.index(bucket.inode) + 1]

    def close(self) -> None:
        """Give all memory back; it is freed once the workers have unmapped it."""
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
    """Memory of one bucket."""

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


def _padded_bytes(weight: WeightTensor) -> int:
    return -(-weight.nbytes // _ALIGNMENT) * _ALIGNMENT
