"""Engines `delta-<engine>`: what changed since the version committed last goes over another engine; the result is that of sending everything.

Each tensor goes as nothing (it did not change), as a change (see rl_ckpt_engine.delta), or whole when that is smaller. The sender keeps a copy of
the version committed last, the baseline; it moves in `finalize`, when every receiver in good standing has activated the new version. A receiver
keeps a copy of what it received last, and what the last change replaced, so that it can go back when the version was given up.

The manifest describes the full tensors with their digests, so what comes out is verified as with any engine. A receiver without the baseline
is refused; the manager brings it in with a full version (`republish`).
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self, cast

import msgspec
import numpy as np

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.delta import Bytes, Change, compare, decode, encode
from rl_ckpt_engine.digests import tensor_digest
from rl_ckpt_engine.engine import CheckpointEngine, CheckpointEngineWithCache, GroupEngine, Topology
from rl_ckpt_engine.manifest import (
    Manifest,
    TensorEntry,
    WeightKind,
    decode_struct,
    plan,
)
from rl_ckpt_engine.stream import Deadline, verify
from rl_protocol.dtypes import storage_dtype
from rl_protocol.errors import WeightSyncError
from rl_protocol.weights import WeightTensor


class DeltaPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the tensors of a manifest travel."""

    baseline: bytes
    """Identity (see Manifest.identity) of the weights that the changes are for; empty: every tensor goes whole."""
    whole: tuple[bool, ...]
    """For each tensor: its blob is the tensor itself, not a change. A change of 0 bytes is none."""
    carrier: bytes
    """Manifest of the engine that the blobs go over."""


_decoder = msgspec.msgpack.Decoder(DeltaPlacement)


class Copy:
    """A receiver's or sender's own copy of one version.

    Args:
        identity: of the weights.
        entries: names, types, shapes and places.
        memory: uint8 [payload bytes].
    """

    def __init__(self, identity: bytes, entries: tuple[TensorEntry, ...], memory: Bytes) -> None:
        self.identity = identity
        self.entries = entries
        self.memory = memory

    def layout(self) -> list[tuple[str, str, tuple[int, ...], int]]:
        """Everything but the bytes."""
        return [(e.name, e.dtype, e.shape, e.offset) for e in self.entries]

    def bytes_of(self, entry: TensorEntry) -> Bytes:
        """Of a tensor, writable."""
        return self.memory[entry.offset : entry.end]

    def tensors(self) -> list[WeightTensor]:
        """Views."""
        return [WeightTensor(e.name, e.dtype, e.shape, self.bytes_of(e)) for e in self.entries]


@dataclass(frozen=True, slots=True)
class _Pending:
    """Sent and not finalized: what the baseline becomes."""

    manifest: Manifest
    news: tuple[Change | Bytes, ...]
    """For each tensor: its change, or its bytes."""


class DeltaEngine(CheckpointEngineWithCache):
    """See the module's docstring; `over` makes the class for an engine. Memory: one copy of the weights at each end, and the changes.

    Attributes:
        changed_share: of what was sent last, the elements whose bits differ from the baseline, of all; those of a tensor that it does not have
            all count.
    """

    inner: ClassVar[type[CheckpointEngine]]

    def __init__(self, config: CheckpointEngineConfig | None = None) -> None:
        self._config = CheckpointEngineConfig() if config is None else config
        self._carrier = self.inner.create(self._config)
        self._base: Copy | None = None
        self._base_manifest: Manifest | None = None
        self._pending: _Pending | None = None
        self._mine: Copy | None = None
        self._received: Manifest | None = None
        self._undo: _Undo | None = None
        self._outlet: Self | None = None
        self.changed_share = 0.0

    @classmethod
    def create(cls, config: CheckpointEngineConfig) -> Self:
        """See CheckpointEngine.create."""
        return cls(config)

    def prepare(self) -> bytes:
        """See CheckpointEngine.prepare."""
        return self._carrier.prepare()

    @classmethod
    def build_topology(cls, sender_metadata: bytes, receiver_metadatas: Sequence[bytes]) -> Topology:
        """See CheckpointEngine.build_topology."""
        return cls.inner.build_topology(sender_metadata, receiver_metadatas)

    def init_process_group(self, member: bytes) -> None:
        """See CheckpointEngine.init_process_group."""
        self._carrier.init_process_group(member)

    # ------------------------------------------------------------------------------------------------------------ sender

    async def send_weights(
        self, weights: Iterable[WeightTensor], version: int, *, timeout_s: float, kind: WeightKind = "full"
    ) -> Manifest:
        """See CheckpointEngine.send_weights."""
        packing = _Packing(self._base)
        carried = await self._carrier.send_weights(packing.blobs(weights), version, timeout_s=timeout_s, kind=kind)
        manifest = packing.manifest(self.name, carried)
        self._pending = _Pending(manifest, tuple(packing.news))
        self.changed_share = packing.changed / max(packing.elements, 1)
        return manifest

    def finalize(self, version: int) -> None:
        """See CheckpointEngine.finalize; the baseline moves."""
        self._carrier.finalize(version)
        pending, self._pending = self._pending, None
        if pending is not None:
            self._base = _moved(self._base, pending)
            self._base_manifest = pending.manifest

    def abort(self) -> None:
        """See CheckpointEngine.abort; the baseline stays."""
        self._carrier.abort()
        self._pending = None

    # ------------------------------------------------------------------------------------------------------------ receiver

    async def receive_weights(self, manifest: Manifest, *, timeout_s: float) -> list[WeightTensor]:
        """See CheckpointEngine.receive_weights."""
        deadline = Deadline(timeout_s, f"Receiving version {manifest.version}", f"engine {self.name}")
        placement = self._placement(manifest)
        self._received = None
        self._go_back_to(placement.baseline, manifest)
        carried = Manifest.decode(placement.carrier)
        blobs = await self._carrier.receive_weights(carried, timeout_s=deadline.left_s)
        self._undo = _Undo(self._mine)
        try:
            self._mine = self._undo.apply(manifest, placement, blobs)
            self._carrier.confirm(carried)  # before this, the blobs may have been overwritten while they were applied
            weights = self._mine.tensors()
            self.verify_seconds = await verify(manifest, weights, deadline)
        except BaseException:
            self._mine, self._undo = self._undo.restore(), None
            raise
        self._received = manifest
        return weights

    def confirm(self, manifest: Manifest) -> None:
        """See CheckpointEngine.confirm; what was received is a copy."""
        if self._received is None or self._received.sync_id != manifest.sync_id:
            raise WeightSyncError(f"Version {manifest.version} was not received here; nothing can be confirmed.")

    def _placement(self, manifest: Manifest) -> DeltaPlacement:
        placement = decode_struct(_decoder, manifest.placement, f"placement of an engine {self.name!r}")
        if len(placement.whole) != len(manifest.tensors) or (not placement.baseline and not all(placement.whole)):
            raise WeightSyncError(f"The placement of version {manifest.version} does not fit its tensors.")
        return placement

    def _go_back_to(self, baseline: bytes, manifest: Manifest) -> None:
        """Make the own copy the one that the changes are for."""
        if not baseline or (self._mine is not None and self._mine.identity == baseline):
            return
        if self._undo is not None and self._undo.identity == baseline:
            self._mine, self._undo = self._undo.restore(), None
            return
        raise WeightSyncError(
            f"Version {manifest.version} holds changes to weights that this receiver does not have; it must be brought in with a full version: "
            "add it to the manager anew."
        )

    # ------------------------------------------------------------------------------------------------------------ cache

    def get_weights(self) -> tuple[Manifest, list[WeightTensor]]:
        """See CheckpointEngineWithCache.get_weights; at a sender, the version committed last."""
        if self._base is not None and self._base_manifest is not None:
            return self._base_manifest, self._base.tensors()
        if self._received is not None and self._mine is not None:
            return self._received, self._mine.tensors()
        raise WeightSyncError(
            f"This engine {self.name!r} has neither received nor committed a version that it could serve."
        )

    async def republish(self, *, timeout_s: float) -> Manifest:
        """See CheckpointEngineWithCache.republish; every tensor whole."""
        kept, weights = self.get_weights()
        self._close_outlet()
        self._outlet = outlet = type(self)(_elsewhere(self._config))
        manifest = await outlet.send_weights(weights, kept.version, timeout_s=timeout_s, kind=kept.kind)
        outlet._carrier.finalize(kept.version)
        outlet._pending = None  # it serves one version and needs no baseline
        return _same(manifest, kept)

    def close(self) -> None:
        """See CheckpointEngine.close."""
        self._close_outlet()
        self._carrier.close()
        self._base = self._mine = self._base_manifest = self._pending = self._received = self._undo = None

    def _close_outlet(self) -> None:
        if self._outlet is not None:
            self._outlet.close()
            if self._outlet._config.directory:
                shutil.rmtree(self._outlet._config.directory, ignore_errors=True)
            self._outlet = None


class DeltaGroupEngine(DeltaEngine, GroupEngine):
    """Over an engine whose members form a group; late joiners form one with the sender."""

    @property
    def _group(self) -> GroupEngine:
        return cast("GroupEngine", self._carrier)

    async def join(self, *, timeout_s: float) -> None:
        """See GroupEngine.join."""
        await self._group.join(timeout_s=timeout_s)

    async def serve(self, manifest: Manifest, *, timeout_s: float) -> None:
        """See GroupEngine.serve."""
        await self._group.serve(Manifest.decode(self._placement(manifest).carrier), timeout_s=timeout_s)

    def leave(self) -> None:
        """See GroupEngine.leave."""
        self._group.leave()

    async def receive_weights(self, manifest: Manifest, *, timeout_s: float) -> list[WeightTensor]:
        """See CheckpointEngine.receive_weights."""
        try:
            return await super().receive_weights(manifest, timeout_s=timeout_s)
        except WeightSyncError:
            self.leave()  # it may have been refused before a byte moved, and the others wait for this member
            raise

    async def offer(
        self, weights: Iterable[WeightTensor], version: int, *, timeout_s: float, kind: WeightKind = "full"
    ) -> Manifest:
        """See GroupEngine.offer; every tensor whole."""
        packing = _Packing(None)
        carried = await self._group.offer(packing.blobs(weights), version, timeout_s=timeout_s, kind=kind)
        return packing.manifest(self.name, carried)

    async def republish(self, *, timeout_s: float) -> Manifest:
        """See CheckpointEngineWithCache.republish; the sender's part alone."""
        if self._base is None:
            raise WeightSyncError(f"Engine {self.name!r} serves late joiners from the sender alone.")
        kept, weights = self.get_weights()
        return _same(await self.offer(weights, kept.version, timeout_s=timeout_s, kind=kept.kind), kept)


def over(engine: type[CheckpointEngine]) -> type[DeltaEngine]:
    """The delta engine whose blobs go over `engine`.

    >>> from rl_ckpt_engine.engines.shm import ShmEngine
    >>> over(ShmEngine).name
    'delta-shm'
    """
    base = DeltaGroupEngine if issubclass(engine, GroupEngine) else DeltaEngine
    facts = {
        "API_VERSION": 1,
        "__doc__": f"Changes over engine {engine.name!r}.",
        "name": f"delta-{engine.name}",
        "capabilities": replace(engine.capabilities, zero_copy=False),
        "inner": engine,
    }
    return cast("type[DeltaEngine]", type(f"Delta{engine.__name__}", (base,), facts))


class _Packing:
    """Turns tensors into blobs against a baseline, or each into itself without one."""

    def __init__(self, base: Copy | None) -> None:
        self._base = base
        self.entries: list[TensorEntry] = []
        self.whole: list[bool] = []
        self.news: list[Change | Bytes] = []
        self.elements = 0
        self.changed = 0

    def blobs(self, weights: Iterable[WeightTensor]) -> Iterator[WeightTensor]:
        """One for each tensor."""
        old = () if self._base is None else self._base.entries
        for number, (weight, offset) in enumerate(plan(weights)):
            entry = TensorEntry(
                weight.name, weight.dtype, weight.shape, offset, weight.nbytes, tensor_digest(weight.data.data)
            )
            self.entries.append(entry)
            before = old[number] if number < len(old) else None
            yield WeightTensor(weight.name, "uint8", (len(blob := self._blob(weight, entry, before)),), blob)

    def manifest(self, engine: str, carried: Manifest) -> Manifest:
        """Of the tensors, whose blobs the carrier has published."""
        placement = DeltaPlacement(
            baseline=b"" if self._base is None else self._base.identity,
            whole=tuple(self.whole),
            carrier=carried.encode(),
        )
        return Manifest.new(
            tuple(self.entries),
            version=carried.version,
            engine=engine,
            kind=carried.kind,
            sender=carried.sender,
            placement=msgspec.msgpack.encode(placement),
        )

    def _blob(self, weight: WeightTensor, entry: TensorEntry, before: TensorEntry | None) -> Bytes:
        fits = before is not None and (before.name, before.dtype, before.shape, before.offset) == (
            entry.name,
            entry.dtype,
            entry.shape,
            entry.offset,
        )
        itemsize = storage_dtype(entry.dtype).itemsize
        self.elements += weight.nbytes // itemsize
        if self._base is not None and before is not None and fits:
            change = compare(self._base.bytes_of(before), weight.data, itemsize)
            self.changed += change.positions.size
            blob = encode(change) if change.positions.size else b""
            if len(blob) < weight.nbytes or not change.positions.size:
                self.news.append(change)
                self.whole.append(False)
                return np.frombuffer(blob, np.uint8)
        else:
            self.changed += weight.nbytes // itemsize
        self.news.append(weight.data)
        self.whole.append(True)
        return weight.data


class _Undo:
    """The way from a copy to the next version, and back."""

    def __init__(self, copy: Copy | None) -> None:
        self._copy = copy
        self._replaced: list[tuple[TensorEntry, Change | Bytes]] = []
        self.identity = b"" if copy is None else copy.identity

    def apply(self, manifest: Manifest, placement: DeltaPlacement, blobs: Sequence[WeightTensor]) -> Copy:
        """The copy with the blobs written into it; one of another layout is made anew."""
        target = Copy(manifest.identity, manifest.tensors, np.empty(0, np.uint8))
        in_place = self._copy is not None and self._copy.layout() == target.layout()
        if self._copy is not None and in_place:
            target.memory = self._copy.memory
        else:
            target.memory = np.empty(manifest.payload_nbytes, np.uint8)
        if [e.name for e in manifest.tensors] != [blob.name for blob in blobs]:
            raise WeightSyncError(f"The blobs of version {manifest.version} are not those of its tensors.")
        for entry, whole, blob in zip(manifest.tensors, placement.whole, blobs, strict=True):
            data = target.bytes_of(entry)
            if whole:
                if blob.nbytes != entry.nbytes:
                    raise WeightSyncError(
                        f"Tensor {entry.name!r} came with {blob.nbytes} bytes instead of {entry.nbytes}."
                    )
                if in_place:
                    self._replaced.append((entry, data.copy()))
                data[:] = blob.data
                continue
            if not in_place:
                data[:] = self._old(entry)
            if blob.nbytes:
                itemsize = storage_dtype(entry.dtype).itemsize
                before = decode(blob.data.data, itemsize, entry.nbytes // itemsize).apply(data)
                if in_place:
                    self._replaced.append((entry, before))
        return target

    def _old(self, entry: TensorEntry) -> Bytes:
        for old in () if self._copy is None else self._copy.entries:
            if (old.name, old.dtype, old.shape) == (entry.name, entry.dtype, entry.shape):
                assert self._copy is not None
                return self._copy.bytes_of(old)
        raise WeightSyncError(f"Tensor {entry.name!r} came as a change, yet it is not here.")

    def restore(self) -> Copy | None:
        """The copy as it was."""
        if self._copy is not None:
            for entry, before in reversed(self._replaced):
                _put(before, self._copy.bytes_of(entry))
        return self._copy


def _elsewhere(config: CheckpointEngineConfig) -> CheckpointEngineConfig:
    """A directory belongs to one sender."""
    if not config.directory:
        return config
    return replace(config, directory=str(Path(config.directory) / f"kept-{os.getpid()}-{secrets.token_hex(4)}"))


def _same(manifest: Manifest, kept: Manifest) -> Manifest:
    if not manifest.same_weights(kept):
        raise WeightSyncError(f"The copy of version {kept.version} was damaged; a new sync is needed.")
    return manifest


def _put(news: Change | Bytes, data: Bytes) -> None:
    if isinstance(news, Change):
        news.apply(data)
    else:
        data[:] = news


def _moved(base: Copy | None, pending: _Pending) -> Copy | None:
    """The baseline after a sync. None when the source changed its tensors meanwhile: then the next version goes whole."""
    manifest = pending.manifest
    moved = Copy(manifest.identity, manifest.tensors, np.empty(0, np.uint8))
    same = base is not None and base.layout() == moved.layout()
    moved.memory = base.memory if base is not None and same else np.empty(manifest.payload_nbytes, np.uint8)
    for entry, news in zip(manifest.tensors, pending.news, strict=True):
        data = moved.bytes_of(entry)
        if isinstance(news, Change) and base is not None and not same:
            data[:] = base.bytes_of(entry)
        _put(news, data)
        if not isinstance(news, Change) and tensor_digest(data.data) != entry.digest:
            return None
    return moved
