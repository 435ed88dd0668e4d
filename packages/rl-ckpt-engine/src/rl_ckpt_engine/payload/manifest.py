"""Manifest: names, element types, shapes, offsets and digests of one version's tensors.

A manifest is encoded as msgpack of `Manifest`. It describes a payload: one run of bytes in which
each tensor begins at a multiple of 64.

* A reader MUST refuse unknown or missing fields; tensors that overlap, are out of order, misaligned
  or outside the payload; a size that does not match element type and shape; duplicate names; and a
  manifest whose own digest does not match.
* Digests are xxh3-128, 16 bytes (for tensors see `digests`). They detect corruption and torn reads,
  not forgery.
* Tensors of 0 bytes and scalars (shape ()) are listed like any other. Tied weights are sent once
  per name.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Self, TypeAlias, TypeVar

import msgspec

from rl_ckpt_engine.payload.digests import digest_of
from rl_protocol.batch.dtypes import storage_dtype
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import UNREADABLE, SchemaError, WeightSyncError

ALIGN = 64
DIGEST_BYTES = 16
_MAX_VERSION = 2**63 - 1
S = TypeVar("S")
WeightKind: TypeAlias = Literal["full", "lora"]


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Name, type, location and digest of one tensor."""

    name: str
    dtype: str
    """Element type, see rl_protocol.batch.dtypes."""
    shape: tuple[int, ...]
    offset: int
    """First byte, counted from the start of the payload; a multiple of 64."""
    nbytes: int
    digest: bytes
    """16 bytes; see rl_ckpt_engine.payload.digests."""

    @property
    def end(self) -> int:
        """The byte after the last."""
        return self.offset + self.nbytes


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One version of the weights as sent by one sender."""

    version: int
    """Weight version, >= 0."""
    sync_id: bytes
    """16 random bytes that distinguish two sends of the same version."""
    engine: str
    """Name of the engine that sent the version; only the same engine can receive it."""
    kind: WeightKind = "full"
    """`full`: every weight of the model; `lora`: only those of an adapter."""
    tensors: tuple[TensorEntry, ...]
    """In the order of the source and of the offsets."""
    payload_nbytes: int
    """Size of the payload, including padding between tensors."""
    sender: bytes
    """The sender's metadata, as returned by its engine's `prepare`."""
    placement: bytes
    """Location of the payload, in the engine's encoding."""
    digest: bytes = b""
    """xxh3-128 over the manifest encoded with this field empty."""

    @property
    def tensor_nbytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(entry.nbytes for entry in self.tensors)

    @property
    def identity(self) -> bytes:
        """xxh3-128 of names, types, shapes and digests: equal for equal weights from any sender."""
        return digest_of(_encoder.encode([(e.name, e.dtype, e.shape, e.digest) for e in self.tensors]))

    def same_weights(self, other: Manifest) -> bool:
        """Whether both describe the same version with the same names and bytes, regardless of
        location."""
        return (self.version, self.kind, self.identity) == (other.version, other.kind, other.identity)

    @classmethod
    def new(
        cls,
        tensors: tuple[TensorEntry, ...],
        *,
        version: int,
        engine: str,
        kind: WeightKind,
        sender: bytes,
        placement: bytes,
    ) -> Manifest:
        """The sealed manifest of a new synchronization.

        Raises:
            WeightSyncError: see `sealed`.
        """
        return cls(
            version=version,
            sync_id=secrets.token_bytes(DIGEST_BYTES),
            engine=engine,
            kind=kind,
            tensors=tensors,
            payload_nbytes=payload_size(tensors),
            sender=sender,
            placement=placement,
        ).sealed()

    def sealed(self) -> Self:
        """The same manifest with its digest filled in.

        Raises:
            WeightSyncError: the manifest breaks a rule of this module.
        """
        filled = msgspec.structs.replace(self, digest=_self_digest(self))
        check(filled)
        return filled

    def encode(self) -> bytes:
        """Encode as msgpack; the inverse of `decode`."""
        return _encoder.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Decode and check a manifest.

        Raises:
            WeightSyncError: the bytes are truncated, changed or inconsistent.
        """
        manifest = decode_struct(_decoder, data, "weight manifest")
        check(manifest)
        return manifest


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def decode_struct(decoder: msgspec.msgpack.Decoder[S], data: bytes, what: str) -> S:
    """Decode msgpack bytes from another process.

    Raises:
        WeightSyncError: the bytes can't be decoded; the message calls them `what`.
    """
    try:
        return decoder.decode(data)
    except UNREADABLE as error:
        raise WeightSyncError(f"The {len(data)} bytes received are no {what}: {error}.") from error


def plan(weights: Iterable[WeightTensor]) -> Iterator[tuple[WeightTensor, int]]:
    """Yield each tensor with its offset, lazily, so a source need not hold the whole model at once.

    Offsets depend only on the sizes of the preceding tensors: the same model always gets the same
    layout.

    Raises:
        WeightSyncError: a name occurs twice.
    """
    seen: set[str] = set()
    end = 0
    for weight in weights:
        if weight.name in seen:
            raise WeightSyncError(f"Tensor {weight.name!r} occurs twice in the weights; names must be unique.")
        seen.add(weight.name)
        yield weight, end
        end = aligned(end + weight.nbytes)


def aligned(size: int) -> int:
    """The next multiple of 64."""
    return -(-size // ALIGN) * ALIGN


def payload_size(tensors: Sequence[TensorEntry]) -> int:
    """Size of the payload: the end of its last tensor."""
    return max((entry.offset + entry.nbytes for entry in tensors), default=0)


def check(manifest: Manifest) -> None:
    """Check a manifest against the rules of this module.

    Raises:
        WeightSyncError: a rule is broken; names the tensor and the rule.
    """
    what = f"Manifest of version {manifest.version}"
    if not 0 <= manifest.version <= _MAX_VERSION:
        raise WeightSyncError(f"{what}: versions run from 0 to 2**63 - 1.")
    if len(manifest.sync_id) != DIGEST_BYTES:
        raise WeightSyncError(f"{what}: sync_id has {len(manifest.sync_id)} bytes instead of {DIGEST_BYTES}.")
    if manifest.digest != _self_digest(manifest):
        raise WeightSyncError(f"{what}: its digest does not fit its content; the manifest was changed on its way.")
    end = 0
    names: set[str] = set()
    for entry in manifest.tensors:
        _check_entry(entry, end, manifest.payload_nbytes, what)
        if entry.name in names:
            raise WeightSyncError(f"{what}: tensor {entry.name!r} occurs twice.")
        names.add(entry.name)
        end = entry.offset + entry.nbytes
    if end != manifest.payload_nbytes:
        raise WeightSyncError(f"{what}: the tensors end at byte {end}, the payload at {manifest.payload_nbytes}.")


def _check_entry(entry: TensorEntry, previous_end: int, payload_nbytes: int, what: str) -> None:
    where = f"{what}: tensor {entry.name!r}"
    try:
        itemsize = storage_dtype(entry.dtype).itemsize
    except SchemaError as error:
        raise WeightSyncError(f"{where}: {error}") from error
    if any(size < 0 for size in entry.shape):
        raise WeightSyncError(f"{where} has the impossible shape {entry.shape}.")
    want = itemsize * math.prod(entry.shape)
    if entry.nbytes != want:
        raise WeightSyncError(
            f"{where} of type {entry.dtype} and shape {entry.shape} takes {want} bytes; the manifest says {entry.nbytes}."
        )
    if entry.offset % ALIGN:
        raise WeightSyncError(f"{where} begins at byte {entry.offset}, which is no multiple of {ALIGN}.")
    if entry.offset < previous_end:
        raise WeightSyncError(
            f"{where} begins at byte {entry.offset}, before the end of its predecessor at {previous_end}."
        )
    if entry.offset + entry.nbytes > payload_nbytes:
        raise WeightSyncError(
            f"{where} ends at byte {entry.offset + entry.nbytes}, beyond the payload of {payload_nbytes} bytes."
        )
    if len(entry.digest) != DIGEST_BYTES:
        raise WeightSyncError(f"{where} has a digest of {len(entry.digest)} bytes instead of {DIGEST_BYTES}.")


def _self_digest(manifest: Manifest) -> bytes:
    return digest_of(_encoder.encode(msgspec.structs.replace(manifest, digest=b"")))
