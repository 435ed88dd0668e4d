"""PublishingEngine: base class of engines whose sender publishes a version to fetch.

A subclass checks metadata (`_check_members`), stores the bytes of a version (`VersionStore`) and
gets them at the receiver: in buckets (`_pull`), or without a copy (`_fetch`). One that declares
`prefetches` also gets what has been written of the next version (`_pull_ahead`), and tells its
receivers how much that is (`_on_progress`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Generic, Self

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.engines.base.prefetch import Prefetch
from rl_ckpt_engine.engines.base.receive_buffer import Bucket, ReceiveBuffers, receiving, require_received
from rl_ckpt_engine.engines.base.version_sender import P, VersionSender
from rl_ckpt_engine.engines.contract import CheckpointEngine, Topology
from rl_ckpt_engine.payload.block_stream import Deadline
from rl_ckpt_engine.payload.manifest import Manifest, TensorEntry, WeightKind, payload_size
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError


class PublishingEngine(CheckpointEngine, Generic[P]):
    """Implements everything but `_check_members`, `_new_store` and `_pull` or `_fetch`.

    See `VersionSender` and `ReceiveBuffer` for the two sides.
    """

    def __init__(self, config: CheckpointEngineConfig | None = None) -> None:
        self._config = CheckpointEngineConfig() if config is None else config
        self._buffers = ReceiveBuffers(self._config.bucket_bytes)
        progress = self._on_progress if self.capabilities.prefetches else None
        self._sending: VersionSender[P] = VersionSender(self.name, self._new_store, self._identity, progress)
        self._sender: bytes | None = None
        self._received: tuple[Manifest, list[WeightTensor]] | None = None
        self._republisher: PublishingEngine[P] | None = None
        self._layout: tuple[TensorEntry, ...] = ()
        self._expected: tuple[TensorEntry, ...] = ()
        self._prefetch: Prefetch | None = None

    @classmethod
    def create(cls, config: CheckpointEngineConfig) -> Self:
        return cls(config)

    # ---- to implement

    @classmethod
    @abstractmethod
    def _check_members(cls, sender: bytes, receivers: Sequence[bytes]) -> None:
        """Raise WeightSyncError if metadata can't be decoded or the members can't work together."""

    @abstractmethod
    def _new_store(self) -> P:
        """Create the store for one version."""

    def _pull(self, manifest: Manifest, buckets: Sequence[Bucket], deadline: Deadline) -> AsyncGenerator[None]:
        """Fill the memory of each bucket in order and yield after each; needed unless `_fetch` is
        overridden."""
        raise NotImplementedError

    async def _fetch(self, manifest: Manifest, deadline: Deadline) -> list[WeightTensor]:
        """Get the tensors of the manifest and compare each with its digest."""
        buffer = self._buffers.next()
        weights = await buffer.fill(manifest, lambda buckets: self._pull(manifest, buckets, deadline), deadline)
        self.verify_seconds = buffer.verify_seconds
        return weights

    def _pull_ahead(self, buckets: Sequence[Bucket], prefetch: Prefetch) -> AsyncGenerator[None]:
        """As `_pull`, of the version that is being sent; ends when the sender writes no more."""
        raise NotImplementedError

    def _on_progress(self, store: P, written: int) -> None:
        """Tell receivers that this many bytes of the version being sent are in the store."""
        raise NotImplementedError

    def _forget_sender(self) -> None:
        """Drop what belongs to the sender joined before: another follows, or the engine closes."""

    def _identity(self) -> bytes:
        """The sender's metadata for manifests."""
        return self.prepare()

    def _new_republisher(self) -> PublishingEngine[P]:
        """Create an engine like this one that serves the received version."""
        return type(self)(self._config)

    # ---- group

    @classmethod
    def build_topology(cls, sender_metadata: bytes, receiver_metadatas: Sequence[bytes]) -> Topology:
        """Receivers get the sender's metadata; the sender needs none of theirs."""
        cls._check_members(sender_metadata, receiver_metadatas)
        return Topology(sender=sender_metadata, receivers=(sender_metadata,) * len(receiver_metadatas))

    def init_process_group(self, member: bytes) -> None:
        self._check_members(member, [])
        if member != self._sender:
            self._forget_sender()
        self._sender = member

    # ---- sender

    async def send_weights(
        self, weights: Iterable[WeightTensor], version: int, *, timeout_s: float, kind: WeightKind = "full"
    ) -> Manifest:
        return await self._sending.send(weights, version, timeout_s=timeout_s, kind=kind)

    def finalize(self, version: int) -> None:
        self._sending.finalize(version)

    def abort(self) -> None:
        self._sending.abort()

    # ---- receiver

    @property
    def pulled_nbytes(self) -> int:
        """Bytes that the last `receive_weights` requested; excludes tensors that were already
        there."""
        return self._buffers.current.pulled_nbytes

    async def prefetch(self, version: int, *, timeout_s: float) -> None:
        """See `CheckpointEngine.prefetch`. Tensors that did not change in the last version, such as
        frozen weights, are not prefetched."""
        if not self.capabilities.prefetches:
            raise self._lacks("receives nothing before its manifest")
        deadline = Deadline(timeout_s, f"Prefetching version {version}", f"engine {self.name}")
        await self._end_prefetch(deadline)
        if self._expected and self._sender is not None:
            self._received = None  # its memory is reused
            self._prefetch = Prefetch(version, deadline, self._receive_ahead)

    async def _receive_ahead(self, prefetch: Prefetch) -> None:
        await self._buffers.next().prefetch(
            self._expected,
            payload_size(self._layout),
            lambda buckets: self._pull_ahead(buckets, prefetch),
            prefetch.deadline,
        )

    async def _end_prefetch(self, deadline: Deadline) -> None:
        if self._prefetch is not None:
            try:
                await self._prefetch.end(deadline)
            finally:
                if self._prefetch.done:
                    self._prefetch = None

    async def receive_weights(self, manifest: Manifest, *, timeout_s: float) -> list[WeightTensor]:
        deadline = receiving(manifest, timeout_s, self.name)
        self._check_joined(manifest)
        deadline.check()
        await self._end_prefetch(deadline)
        self._received = None
        weights = await self._fetch(manifest, deadline)
        self._require_there(manifest)
        self._received = (manifest, weights)
        if self.capabilities.prefetches:
            self.prefetched_nbytes = self._buffers.current.prefetched_nbytes
            self._expect(manifest.tensors)
        return weights

    def _expect(self, tensors: tuple[TensorEntry, ...]) -> None:
        """Expect the tensors that changed since the version before to change in the next one."""
        former = {entry.name: entry for entry in self._layout}
        self._layout, self._expected = tensors, tuple(entry for entry in tensors if former.get(entry.name) != entry)

    def confirm(self, manifest: Manifest) -> None:
        require_received(manifest, None if self._received is None else self._received[0])
        self._require_there(manifest)

    def _require_there(self, manifest: Manifest) -> None:
        """Raise WeightSyncError if the sender dropped the received version. Copies stay valid: no
        check here."""

    def watch(self, manifest: Manifest) -> Callable[[], None]:
        self.confirm(manifest)
        return self._buffers.current.hold()

    def get_weights(self) -> tuple[Manifest, list[WeightTensor]]:
        if self._received is None:
            raise WeightSyncError(f"This engine {self.name!r} has received no version that it could serve.")
        self.confirm(self._received[0])
        return self._received

    async def republish(self, *, timeout_s: float) -> Manifest:
        """Serve a copy of the version received last, kept until the next call or `close`."""
        received, weights = self.get_weights()
        self._close_republisher()
        self._republisher = self._new_republisher()
        manifest = await self._republisher.send_weights(
            weights, received.version, timeout_s=timeout_s, kind=received.kind
        )
        self.confirm(received)
        if not manifest.same_weights(received):
            self._close_republisher()
            raise WeightSyncError(
                f"The weights of version {received.version} changed while they were copied for others."
            )
        self._republisher.finalize(received.version)
        return manifest

    def _check_joined(self, manifest: Manifest) -> None:
        if self._sender is None or manifest.sender != self._sender:
            raise WeightSyncError(
                "The manifest comes from a sender this receiver has not joined; call init_process_group."
            )

    # ---- end

    def close(self) -> None:
        if self._prefetch is not None:
            self._prefetch.cancel()
        self._forget_sender()  # before the memory is freed, so that no peer can read it
        self._close_republisher()
        self._received = None
        self._sending.close()
        self._buffers.clear()

    def _close_republisher(self) -> None:
        if self._republisher is not None:
            self._republisher.close()
            self._republisher = None
