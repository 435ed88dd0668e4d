"""Engine `naive`: sender and receivers in one process share the tensors themselves; nothing is copied.

The sender's tensors must not change between `send_weights` and the end of loading; a change before loading is caught by the digests.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar
from weakref import WeakValueDictionary

import msgspec

from rl_ckpt_engine.engine import Capabilities, CheckpointEngine, Topology
from rl_ckpt_engine.ledger import Published, SendLedger
from rl_ckpt_engine.manifest import DIGEST_BYTES, Manifest, decode_struct, payload_size
from rl_ckpt_engine.stream import Deadline, emit, verify
from rl_protocol.errors import WeightSyncError
from rl_protocol.weights import WeightTensor


class NaiveMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Metadata of one member."""

    pid: int
    token: bytes
    """Random name of the engine object within its process."""


_encode = msgspec.msgpack.encode
_decoder = msgspec.msgpack.Decoder(NaiveMember)
_engines: WeakValueDictionary[bytes, NaiveEngine] = WeakValueDictionary()
"""token -> living engine of this process."""


class NaiveEngine(CheckpointEngine):
    """See the module's docstring; a sender keeps references to the tensors of the last two versions."""

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "naive"
    capabilities: ClassVar[Capabilities] = Capabilities(
        same_host_only=True, zero_copy=True, elastic=True, devices=("cpu",)
    )

    def __init__(self) -> None:
        self._me = NaiveMember(pid=os.getpid(), token=secrets.token_bytes(DIGEST_BYTES))
        self._sender: NaiveMember | None = None
        self._ledger: SendLedger[list[WeightTensor]] = SendLedger()
        self._running: Deadline | None = None
        _engines[self._me.token] = self

    def prepare(self) -> bytes:
        """See CheckpointEngine.prepare."""
        return _encode(self._me)

    @classmethod
    def build_topology(cls, sender_metadata: bytes, receiver_metadatas: Sequence[bytes]) -> Topology:
        """See CheckpointEngine.build_topology."""
        sender = _member(sender_metadata)
        for metadata in receiver_metadatas:
            receiver = _member(metadata)
            if receiver.pid != sender.pid:
                raise WeightSyncError(
                    f"Engine 'naive' works within one process; the sender is process {sender.pid}, a receiver {receiver.pid}. "
                    "Set checkpoint_engine.backend to shm."
                )
        return Topology(sender=sender_metadata, receivers=(sender_metadata,) * len(receiver_metadatas))

    def init_process_group(self, member: bytes) -> None:
        """See CheckpointEngine.init_process_group."""
        self._sender = _member(member)

    async def send_weights(self, weights: Iterable[WeightTensor], version: int, *, timeout_s: float) -> Manifest:
        """See CheckpointEngine.send_weights."""
        self._ledger.begin(version)
        try:
            self._running = Deadline(timeout_s, f"Sending version {version}", "engine naive")
            held: list[WeightTensor] = []
            entries = await emit(_keeping(weights, held), _nowhere, self._running)
            manifest = Manifest(
                version=version,
                sync_id=secrets.token_bytes(DIGEST_BYTES),
                engine=self.name,
                tensors=entries,
                payload_nbytes=payload_size(entries),
                sender=self.prepare(),
                placement=b"",
            ).sealed()
            self._ledger.publish(Published(version, manifest.sync_id, held))
            return manifest
        finally:
            self._ledger.cancel()
            self._running = None

    async def receive_weights(self, manifest: Manifest, *, timeout_s: float) -> list[WeightTensor]:
        """See CheckpointEngine.receive_weights."""
        deadline = Deadline(timeout_s, f"Receiving version {manifest.version}", f"process {os.getpid()}, engine naive")
        weights = self._find(manifest)
        for entry, weight in zip(manifest.tensors, weights, strict=True):
            if (entry.name, entry.dtype, entry.shape) != (weight.name, weight.dtype, weight.shape):
                raise WeightSyncError(f"Tensor {entry.name!r} of the manifest is not the one the sender holds.")
        await verify(manifest, weights, deadline)
        self.confirm(manifest)
        return weights

    def confirm(self, manifest: Manifest) -> None:
        """See CheckpointEngine.confirm."""
        self._find(manifest)

    def finalize(self, version: int) -> None:
        """See CheckpointEngine.finalize."""
        self._ledger.finalize(version)

    def abort(self) -> None:
        """See CheckpointEngine.abort."""
        if self._running is not None:
            self._running.cancel("abort() was called")
        self._ledger.abort()

    def close(self) -> None:
        """See CheckpointEngine.close."""
        self.abort()
        self._ledger.committed = None
        _engines.pop(self._me.token, None)

    def _find(self, manifest: Manifest) -> list[WeightTensor]:
        if self._sender is None or manifest.sender != _encode(self._sender):
            raise WeightSyncError(
                "The manifest comes from a sender this receiver has not joined; call init_process_group."
            )
        sender = _engines.get(self._sender.token)
        published = None if sender is None else sender._ledger.find(manifest.sync_id)
        if published is None:
            raise WeightSyncError(
                f"Version {manifest.version} is not there any more: its sender was closed, or went on to a later version. A new sync is needed."
            )
        return list(published.held)


def _member(metadata: bytes) -> NaiveMember:
    return decode_struct(_decoder, metadata, "metadata of an engine 'naive'")


def _keeping(weights: Iterable[WeightTensor], held: list[WeightTensor]) -> Iterator[WeightTensor]:
    for weight in weights:
        held.append(weight)
        yield weight


def _nowhere(offset: int, piece: memoryview) -> None:
    """Hashing is all that sending does here."""
    del offset, piece
