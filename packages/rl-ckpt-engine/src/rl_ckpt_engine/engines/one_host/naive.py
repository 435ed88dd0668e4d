"""Engine `naive`: sender and receivers in one process share the sender's tensors, without a copy.

The tensors must not change between `send_weights` and the end of loading. `confirm` compares them
with their digests: a version that changed before loading is refused, one that changed during
loading is reported. A receiver may compute with the sender's tensors themselves; then nothing that
it computed while they changed passes its `watch`, which compares the digests again.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar
from weakref import WeakValueDictionary

import msgspec

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.engines.base.publishing_engine import PublishingEngine
from rl_ckpt_engine.engines.contract import Capabilities
from rl_ckpt_engine.payload.block_stream import Deadline, damaged, verify
from rl_ckpt_engine.payload.digests import tensor_digest
from rl_ckpt_engine.payload.manifest import DIGEST_BYTES, Manifest, decode_struct
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError


class NaiveMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Metadata of one member."""

    pid: int
    token: bytes
    """Random id of the engine object within its process."""


_decoder = msgspec.msgpack.Decoder(NaiveMember)
_engines: WeakValueDictionary[bytes, NaiveEngine] = WeakValueDictionary()
"""token -> live engine of this process."""


class TensorList:
    """References to the tensors of one version."""

    placement = b""
    unordered = True

    def __init__(self) -> None:
        self.tensors: list[WeightTensor] = []

    def begin(self, version: int) -> None:
        """Drop the previous version."""
        del version
        self.withdraw()

    def start(self, weight: WeightTensor, offset: int) -> bool:
        """Keep a reference; the tensor is only hashed."""
        del offset
        self.tensors.append(weight)
        return False

    def write(self, offset: int, piece: memoryview) -> None:
        """Do nothing: nothing is written."""

    def complete(self, manifest: Manifest) -> None:
        """Do nothing: SentVersions knows which versions are complete."""

    def withdraw(self) -> None:
        """Drop the references; receivers have their own lists."""
        self.tensors.clear()

    def close(self) -> None:
        """Drop the references."""
        self.tensors.clear()


class NaiveEngine(PublishingEngine[TensorList]):
    """Shares tensors within one process; a sender keeps references to those of the last two
    versions."""

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "naive"
    capabilities: ClassVar[Capabilities] = Capabilities(
        same_host_only=True,
        same_process_only=True,
        zero_copy=True,
        elastic=True,
        devices=("cpu",),
        caches=True,
        shares=True,
    )

    def __init__(self, config: CheckpointEngineConfig | None = None) -> None:
        super().__init__(config)
        self._me = NaiveMember(pid=os.getpid(), token=secrets.token_bytes(DIGEST_BYTES))
        _engines[self._me.token] = self

    def prepare(self) -> bytes:
        return msgspec.msgpack.encode(self._me)

    @classmethod
    def _check_members(cls, sender: bytes, receivers: Sequence[bytes]) -> None:
        mine = _member(sender)
        for metadata in receivers:
            receiver = _member(metadata)
            if receiver.pid != mine.pid:
                raise WeightSyncError(
                    f"Engine 'naive' works within one process; the sender is process {mine.pid}, a receiver {receiver.pid}. "
                    "Set CheckpointEngineConfig.backend to shm."
                )

    def _new_store(self) -> TensorList:
        return TensorList()

    async def _fetch(self, manifest: Manifest, deadline: Deadline) -> list[WeightTensor]:
        weights = self._find(manifest)
        for entry, weight in zip(manifest.tensors, weights, strict=True):
            if (entry.name, entry.dtype, entry.shape) != (weight.name, weight.dtype, weight.shape):
                raise WeightSyncError(f"Tensor {entry.name!r} of the manifest is not the one the sender holds.")
        self.verify_seconds = await verify(manifest, weights, deadline)
        return weights

    def confirm(self, manifest: Manifest) -> None:
        """Compare every tensor with its digest again."""
        super().confirm(manifest)
        self._compare(manifest)

    def watch(self, manifest: Manifest) -> Callable[[], None]:
        self.confirm(manifest)
        return partial(self._compare, manifest)

    def _compare(self, manifest: Manifest) -> None:
        """Compare the tensors with their digests: they may have been changed in place."""
        for entry, weight in zip(manifest.tensors, self._find(manifest), strict=True):
            if (digest := tensor_digest(weight.data.data)) != entry.digest:
                raise damaged(entry, manifest.version, digest)

    def _require_there(self, manifest: Manifest) -> None:
        self._find(manifest)

    def close(self) -> None:
        super().close()
        _engines.pop(self._me.token, None)

    def _find(self, manifest: Manifest) -> list[WeightTensor]:
        sender = _engines.get(_member(manifest.sender).token)
        published = None if sender is None else sender._sending.versions.find(manifest.sync_id)
        if published is None:
            raise WeightSyncError(
                f"Version {manifest.version} is no longer available: its sender was closed, or has a later version. A new sync is needed."
            )
        return list(published.held.tensors)


def _member(metadata: bytes) -> NaiveMember:
    return decode_struct(_decoder, metadata, "metadata of an engine 'naive'")
