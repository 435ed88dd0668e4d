"""Engine `naive`: sender and receivers in one process share the tensors themselves; nothing is copied.

The sender's tensors must not change between `send_weights` and the end of loading. Nothing can keep the process from changing them, so
`confirm` compares them with their digests: a version that changed before it is loaded is refused, one that changed meanwhile is reported.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakValueDictionary

import msgspec

from rl_ckpt_engine.digests import tensor_digest
from rl_ckpt_engine.engine import Capabilities
from rl_ckpt_engine.engines.base import PublishingEngine
from rl_ckpt_engine.manifest import DIGEST_BYTES, Manifest, decode_struct
from rl_ckpt_engine.stream import Deadline, damaged, verify
from rl_protocol.errors import WeightSyncError
from rl_protocol.weights import WeightTensor


class NaiveMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Metadata of one member."""

    pid: int
    token: bytes
    """Random name of the engine object within its process."""


_decoder = msgspec.msgpack.Decoder(NaiveMember)
_engines: WeakValueDictionary[bytes, NaiveEngine] = WeakValueDictionary()
"""token -> living engine of this process."""


class Shelf:
    """References to the tensors of one version."""

    placement = b""
    unordered = True

    def __init__(self) -> None:
        self.tensors: list[WeightTensor] = []

    def begin(self, version: int) -> None:
        """Forget what was kept."""
        del version
        self.withdraw()

    def start(self, weight: WeightTensor, offset: int) -> None:
        """Keep it."""
        del offset
        self.tensors.append(weight)

    def write(self, offset: int, piece: memoryview) -> None:
        """Hashing is all that sending does here."""

    def complete(self, manifest: Manifest) -> None:
        """The ledger says what is complete."""

    def withdraw(self) -> None:
        """Forget what was kept; receivers have lists of their own."""
        self.tensors.clear()

    def close(self) -> None:
        """Forget what was kept."""
        self.tensors.clear()


class NaiveEngine(PublishingEngine[Shelf]):
    """See the module's docstring; a sender keeps references to the tensors of the last two versions."""

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "naive"
    capabilities: ClassVar[Capabilities] = Capabilities(
        same_host_only=True, zero_copy=True, elastic=True, devices=("cpu",)
    )

    def __init__(self) -> None:
        super().__init__()
        self._me = NaiveMember(pid=os.getpid(), token=secrets.token_bytes(DIGEST_BYTES))
        _engines[self._me.token] = self

    def prepare(self) -> bytes:
        """See CheckpointEngine.prepare."""
        return msgspec.msgpack.encode(self._me)

    @classmethod
    def _check_members(cls, sender: bytes, receivers: Sequence[bytes]) -> None:
        mine = _member(sender)
        for metadata in receivers:
            receiver = _member(metadata)
            if receiver.pid != mine.pid:
                raise WeightSyncError(
                    f"Engine 'naive' works within one process; the sender is process {mine.pid}, a receiver {receiver.pid}. "
                    "Set checkpoint_engine.backend to shm."
                )

    def _new_place(self) -> Shelf:
        return Shelf()

    async def _fetch(self, manifest: Manifest, deadline: Deadline) -> list[WeightTensor]:
        weights = self._find(manifest)
        for entry, weight in zip(manifest.tensors, weights, strict=True):
            if (entry.name, entry.dtype, entry.shape) != (weight.name, weight.dtype, weight.shape):
                raise WeightSyncError(f"Tensor {entry.name!r} of the manifest is not the one the sender holds.")
        self.verify_seconds = await verify(manifest, weights, deadline)
        return weights

    def confirm(self, manifest: Manifest) -> None:
        """See CheckpointEngine.confirm; reads every tensor."""
        super().confirm(manifest)
        for entry, weight in zip(manifest.tensors, self._find(manifest), strict=True):
            if (digest := tensor_digest(weight.data.data)) != entry.digest:
                raise damaged(entry, manifest.version, digest)

    def _require_there(self, manifest: Manifest) -> None:
        self._find(manifest)

    def close(self) -> None:
        """See CheckpointEngine.close."""
        super().close()
        _engines.pop(self._me.token, None)

    def _find(self, manifest: Manifest) -> list[WeightTensor]:
        sender = _engines.get(_member(manifest.sender).token)
        published = None if sender is None else sender._ledger.find(manifest.sync_id)
        if published is None:
            raise WeightSyncError(
                f"Version {manifest.version} is not there any more: its sender was closed, or went on to a later version. A new sync is needed."
            )
        return list(published.held.tensors)


def _member(metadata: bytes) -> NaiveMember:
    return decode_struct(_decoder, metadata, "metadata of an engine 'naive'")
