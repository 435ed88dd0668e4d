"""Engines `delta-<engine>`: send only changes since the last version, over another engine.

Each tensor is sent as nothing (unchanged), as a change (see tensor_changes), or whole if that is
smaller. The sender keeps a copy of the version committed last, the baseline, and updates it in
`finalize`, when every receiver in use has activated the new version. A receiver keeps a copy of the
version received last and the values that the last change replaced, so it can go back if the version
is aborted.

The manifest has the digests of the full tensors, so the result is verified as with any engine. A
receiver without the baseline is refused; the manager adds it with a full version (`republish`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self, cast

import msgspec
import numpy as np

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.engines.contract import CheckpointEngine, Topology
from rl_ckpt_engine.engines.delta.tensor_changes import Bytes, Change, compare, decode, encode
from rl_ckpt_engine.payload.block_stream import Deadline, verify
from rl_ckpt_engine.payload.digests import tensor_digest
from rl_ckpt_engine.payload.manifest import (
    Manifest,
    TensorEntry,
    WeightKind,
    decode_struct,
    plan,
)
from rl_protocol.batch.dtypes import storage_dtype
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError
from rl_protocol.support.host.aligned_memory import aligned_bytes
from rl_protocol.support.temporary_folders import temporary_folder


class DeltaPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the tensors of a manifest are sent."""

    baseline: bytes
    """Identity (see Manifest.identity) of the baseline; empty: every tensor is sent whole."""
    whole: tuple[bool, ...]
    """For each tensor, whether its blob is the tensor itself. A change of 0 bytes means
    unchanged."""
    carrier: bytes
    """Manifest of the engine that sends the blobs."""


_decoder = msgspec.msgpack.Decoder(DeltaPlacement)


class WeightsCopy:
    """A copy of one version, owned by sender or receiver.

    Args:
        identity: identity of the weights.
        entries: names, types, shapes and offsets.
        memory: uint8 [payload bytes].
    """

    def __init__(self, identity: bytes, entries: tuple[TensorEntry, ...], memory: Bytes) -> None:
        self.identity = identity
        self.entries = entries
        self.memory = memory

    def layout(self) -> list[tuple[str, str, tuple[int, ...], int]]:
        """Names, types, shapes and offsets."""
        return [(e.name, e.dtype, e.shape, e.offset) for e in self.entries]

    def bytes_of(self, entry: TensorEntry) -> Bytes:
        """The writable bytes of a tensor."""
        return self.memory[entry.offset : entry.end]

    def tensors(self) -> list[WeightTensor]:
        """The tensors as views."""
        return [WeightTensor(e.name, e.dtype, e.shape, self.bytes_of(e)) for e in self.entries]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A version that was sent and not finalized: the next baseline."""

    manifest: Manifest
    updates: tuple[Change | Bytes, ...]
    """For each tensor, its change or its bytes."""


class DeltaEngine(CheckpointEngine):
    """Sends changes over `inner`; `delta_over` creates the class for an engine.

    Memory: one copy of the weights at each end, and the changes.
    """

    inner: ClassVar[type[CheckpointEngine]]

    def __init__(self, config: CheckpointEngineConfig | None = None) -> None:
        self._config = CheckpointEngineConfig() if config is None else config
        self._carrier = self.inner.create(self._config)
        self._base: WeightsCopy | None = None
        self._base_manifest: Manifest | None = None
        self._pending: _Pending | None = None
        self._mine: WeightsCopy | None = None
        self._received: Manifest | None = None
        self._undo: _Rollback | None = None
        self._republisher: Self | None = None
        self._own_folder = ExitStack()
        """Removes the directory of the republisher."""
        self._send_metrics: dict[str, float] = {}

    @classmethod
    def create(cls, config: CheckpointEngineConfig) -> Self:
        return cls(config)

    def prepare(self) -> bytes:
        return self._carrier.prepare()

    @classmethod
    def build_topology(cls, sender_metadata: bytes, receiver_metadatas: Sequence[bytes]) -> Topology:
        return cls.inner.build_topology(sender_metadata, receiver_metadatas)

    def init_process_group(self, member: bytes) -> None:
        self._carrier.init_process_group(member)

    # ---- sender

    async def send_weights(
        self, weights: Iterable[WeightTensor], version: int, *, timeout_s: float, kind: WeightKind = "full"
    ) -> Manifest:
        packing = _DeltaEncoder(self._base)
        carried = await self._carrier.send_weights(packing.blobs(weights), version, timeout_s=timeout_s, kind=kind)
        manifest = packing.manifest(self.name, carried)
        self._pending = _Pending(manifest, tuple(packing.updates))
        self._send_metrics = {
            "changed_share": packing.changed / max(packing.elements, 1),
            "delta_bytes": float(carried.tensor_nbytes),
        }
        return manifest

    def send_metrics(self) -> dict[str, float]:
        """The share of the elements sent last whose bits differ from the baseline, and the bytes
        sent for them. All elements of a tensor that the baseline lacks count as changed."""
        return self._send_metrics

    def finalize(self, version: int) -> None:
        """Commit the version, which becomes the baseline."""
        self._carrier.finalize(version)
        pending, self._pending = self._pending, None
        if pending is not None:
            self._base = _next_baseline(self._base, pending)
            self._base_manifest = pending.manifest

    def abort(self) -> None:
        """Withdraw the pending version; the baseline stays."""
        self._carrier.abort()
        self._pending = None

    # ---- receiver

    async def receive_weights(self, manifest: Manifest, *, timeout_s: float) -> list[WeightTensor]:
        deadline = Deadline(timeout_s, f"Receiving version {manifest.version}", f"engine {self.name}")
        placement = self._placement(manifest)
        self._received = None
        self._go_back_to(placement.baseline, manifest)
        carried = Manifest.decode(placement.carrier)
        blobs = await self._carrier.receive_weights(carried, timeout_s=deadline.left_s)
        self._undo = _Rollback(self._mine)
        try:
            self._mine = self._undo.apply(manifest, placement, blobs)
            self._carrier.confirm(carried)  # the blobs were not overwritten while they were applied
            weights = self._mine.tensors()
            self.verify_seconds = await verify(manifest, weights, deadline)
        except BaseException:
            self._mine, self._undo = self._undo.restore(), None
            raise
        self._received = manifest
        return weights

    def confirm(self, manifest: Manifest) -> None:
        """Check that this manifest was received; the tensors are a copy and stay valid."""
        if self._received is None or self._received.sync_id != manifest.sync_id:
            raise WeightSyncError(f"Version {manifest.version} was not received here; nothing can be confirmed.")

    def _placement(self, manifest: Manifest) -> DeltaPlacement:
        placement = decode_struct(_decoder, manifest.placement, f"placement of an engine {self.name!r}")
        if len(placement.whole) != len(manifest.tensors) or (not placement.baseline and not all(placement.whole)):
            raise WeightSyncError(f"The placement of version {manifest.version} does not fit its tensors.")
        return placement

    def _go_back_to(self, baseline: bytes, manifest: Manifest) -> None:
        """Make this receiver's copy equal to the baseline of the changes."""
        if not baseline or (self._mine is not None and self._mine.identity == baseline):
            return
        if self._undo is not None and self._undo.identity == baseline:
            self._mine, self._undo = self._undo.restore(), None
            return
        raise WeightSyncError(
            f"Version {manifest.version} has changes to weights that this receiver does not have; it needs a full version: "
            "add it to the manager again."
        )

    # ---- cache

    def get_weights(self) -> tuple[Manifest, list[WeightTensor]]:
        """The version received last or, at a sender, committed last."""
        if self._base is not None and self._base_manifest is not None:
            return self._base_manifest, self._base.tensors()
        if self._received is not None and self._mine is not None:
            return self._received, self._mine.tensors()
        raise WeightSyncError(
            f"This engine {self.name!r} has neither received nor committed a version that it could serve."
        )

    async def republish(self, *, timeout_s: float) -> Manifest:
        """Serve the version with every tensor whole."""
        kept, weights = self.get_weights()
        self._close_republisher()
        config = self._config
        if config.directory:  # one directory belongs to one sender
            folder = self._own_folder.enter_context(temporary_folder("kept-", Path(config.directory)))
            config = replace(config, directory=str(folder))
        self._republisher = republisher = type(self)(config)
        manifest = await republisher.send_weights(weights, kept.version, timeout_s=timeout_s, kind=kept.kind)
        republisher._carrier.finalize(kept.version)
        republisher._pending = None  # it serves one version and needs no baseline
        return _same(manifest, kept)

    def close(self) -> None:
        self._close_republisher()
        self._carrier.close()
        self._base = self._mine = self._base_manifest = self._pending = self._received = self._undo = None

    def _close_republisher(self) -> None:
        if self._republisher is not None:
            self._republisher.close()
            self._republisher = None
        self._own_folder.close()


class DeltaGroupEngine(DeltaEngine):
    """Sends changes in a process group; late joiners form a group with the sender."""

    async def join(self, *, timeout_s: float) -> None:
        await self._carrier.join(timeout_s=timeout_s)

    async def serve(self, manifest: Manifest, *, timeout_s: float) -> None:
        await self._carrier.serve(Manifest.decode(self._placement(manifest).carrier), timeout_s=timeout_s)

    def leave(self) -> None:
        self._carrier.leave()

    async def receive_weights(self, manifest: Manifest, *, timeout_s: float) -> list[WeightTensor]:
        try:
            return await super().receive_weights(manifest, timeout_s=timeout_s)
        except WeightSyncError:
            self.leave()  # else the others would wait for this member if it failed before moving bytes
            raise

    async def offer(
        self, weights: Iterable[WeightTensor], version: int, *, timeout_s: float, kind: WeightKind = "full"
    ) -> Manifest:
        """Publish the version again with every tensor whole."""
        packing = _DeltaEncoder(None)
        carried = await self._carrier.offer(packing.blobs(weights), version, timeout_s=timeout_s, kind=kind)
        return packing.manifest(self.name, carried)

    async def republish(self, *, timeout_s: float) -> Manifest:
        """Serve the committed version; only the sender can."""
        if self._base is None:
            raise WeightSyncError(f"With engine {self.name!r} only the sender serves late joiners.")
        kept, weights = self.get_weights()
        return _same(await self.offer(weights, kept.version, timeout_s=timeout_s, kind=kept.kind), kept)


def delta_over(engine: type[CheckpointEngine]) -> type[DeltaEngine]:
    """The class of the delta engine that sends over `engine`.

    >>> from rl_ckpt_engine.engines.one_host.shm import ShmEngine
    >>> delta_over(ShmEngine).name
    'delta-shm'
    """
    base = DeltaEngine if engine.capabilities.elastic else DeltaGroupEngine
    facts = {
        "API_VERSION": 1,
        "__doc__": f"Changes over engine {engine.name!r}.",
        "name": f"delta-{engine.name}",
        "capabilities": replace(
            engine.capabilities,
            zero_copy=False,
            caches=True,
            direct=False,
            shares=False,
            prefetches=False,
            relays=False,
        ),
        "inner": engine,
    }
    return cast("type[DeltaEngine]", type(f"Delta{engine.__name__}", (base,), facts))


class _DeltaEncoder:
    """Encodes tensors as blobs relative to a baseline; without one, each tensor is its own blob."""

    def __init__(self, base: WeightsCopy | None) -> None:
        self._base = base
        self.entries: list[TensorEntry] = []
        self.whole: list[bool] = []
        self.updates: list[Change | Bytes] = []
        self.elements = 0
        self.changed = 0

    def blobs(self, weights: Iterable[WeightTensor]) -> Iterator[WeightTensor]:
        """Yield one blob per tensor."""
        old = () if self._base is None else self._base.entries
        for number, (weight, offset) in enumerate(plan(weights)):
            entry = TensorEntry(
                weight.name, weight.dtype, weight.shape, offset, weight.nbytes, tensor_digest(weight.data.data)
            )
            self.entries.append(entry)
            before = old[number] if number < len(old) else None
            yield WeightTensor(weight.name, "uint8", (len(blob := self._blob(weight, entry, before)),), blob)

    def manifest(self, engine: str, carried: Manifest) -> Manifest:
        """The manifest of the tensors, given that of the published blobs."""
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
                self.updates.append(change)
                self.whole.append(False)
                return np.frombuffer(blob, np.uint8)
        else:
            self.changed += weight.nbytes // itemsize
        self.updates.append(weight.data)
        self.whole.append(True)
        return weight.data


class _Rollback:
    """Applies changes to a copy and can undo them."""

    def __init__(self, copy: WeightsCopy | None) -> None:
        self._copy = copy
        self._replaced: list[tuple[TensorEntry, Change | Bytes]] = []
        self.identity = b"" if copy is None else copy.identity

    def apply(self, manifest: Manifest, placement: DeltaPlacement, blobs: Sequence[WeightTensor]) -> WeightsCopy:
        """Apply the blobs to the copy, in place if the layout is unchanged, else in a new copy."""
        target = WeightsCopy(manifest.identity, manifest.tensors, np.empty(0, np.uint8))
        in_place = self._copy is not None and self._copy.layout() == target.layout()
        if self._copy is not None and in_place:
            target.memory = self._copy.memory
        else:
            target.memory = aligned_bytes(manifest.payload_nbytes)
        if [e.name for e in manifest.tensors] != [blob.name for blob in blobs]:
            raise WeightSyncError(f"The blobs of version {manifest.version} are not those of its tensors.")
        for entry, whole, blob in zip(manifest.tensors, placement.whole, blobs, strict=True):
            data = target.bytes_of(entry)
            if whole:
                if blob.nbytes != entry.nbytes:
                    raise WeightSyncError(
                        f"Tensor {entry.name!r} was sent with {blob.nbytes} bytes instead of {entry.nbytes}."
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
        raise WeightSyncError(f"Tensor {entry.name!r} was sent as a change, but there is no baseline for it.")

    def restore(self) -> WeightsCopy | None:
        """Undo the changes and return the copy."""
        if self._copy is not None:
            for entry, before in reversed(self._replaced):
                _put(before, self._copy.bytes_of(entry))
        return self._copy


def _same(manifest: Manifest, kept: Manifest) -> Manifest:
    if not manifest.same_weights(kept):
        raise WeightSyncError(f"The copy of version {kept.version} was damaged; a new sync is needed.")
    return manifest


def _put(updates: Change | Bytes, data: Bytes) -> None:
    if isinstance(updates, Change):
        updates.apply(data)
    else:
        data[:] = updates


def _next_baseline(base: WeightsCopy | None, pending: _Pending) -> WeightsCopy | None:
    """The baseline after a sync; None if the source changed its tensors since, so the next version
    is sent whole."""
    manifest = pending.manifest
    moved = WeightsCopy(manifest.identity, manifest.tensors, np.empty(0, np.uint8))
    same = base is not None and base.layout() == moved.layout()
    moved.memory = base.memory if base is not None and same else aligned_bytes(manifest.payload_nbytes)
    for entry, updates in zip(manifest.tensors, pending.updates, strict=True):
        data = moved.bytes_of(entry)
        if isinstance(updates, Change) and base is not None and not same:
            data[:] = base.bytes_of(entry)
        _put(updates, data)
        if not isinstance(updates, Change) and tensor_digest(data.data) != entry.digest:
            return None
    return moved
