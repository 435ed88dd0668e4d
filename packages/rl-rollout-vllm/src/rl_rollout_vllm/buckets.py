"""Weights on their way into the engine's process: checked as a whole, then handed over in buckets of shared memory. No pickle."""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from rl_protocol.errors import WeightSyncError
from rl_protocol.weights import WeightTensor
from rl_rollout_vllm.checkpoint import EMBEDDING, HEAD, Checkpoint

_FLOATS = ("float32", "bfloat16", "float16")
_ALIGNMENT = 64

Entry = tuple[str, str, tuple[int, ...], int, int]
"""Name, element type, shape, offset and number of bytes of a tensor in a bucket."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Memory that another process of this host may map while it is open.

    Attributes:
        path: to be opened by that process.
        entries: what lies in it.
        checksum: CRC-32 of all its bytes: whoever maps it says what it has read.
    """

    path: str
    entries: tuple[Entry, ...]
    checksum: int


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


@contextmanager
def shared(weights: Sequence[WeightTensor]) -> Generator[Bucket]:
    """A copy of the weights in fresh anonymous memory of this process.

    Each bucket has memory of its own, for the engine keeps tensors until it has all of a layer: memory that were written again
    would change them under its hands. What another process has mapped lives on until it lets go.
    """
    entries: list[Entry] = []
    used = 0
    for weight in weights:
        entries.append((weight.name, weight.dtype, weight.shape, used, weight.nbytes))
        used += _room(weight)
    fd = os.memfd_create("rl-rollout-vllm")
    try:
        os.ftruncate(fd, max(used, 1))
        with mmap.mmap(fd, 0) as memory:
            into = np.frombuffer(memory, np.uint8)
            for weight, (_, _, _, offset, nbytes) in zip(weights, entries, strict=True):
                into[offset : offset + nbytes] = weight.data
            del into
            checksum = zlib.crc32(memory)
        yield Bucket(f"/proc/{os.getpid()}/fd/{fd}", tuple(entries), checksum)
    finally:
        os.close(fd)


def _room(weight: WeightTensor) -> int:
    return -(-weight.nbytes // _ALIGNMENT) * _ALIGNMENT
