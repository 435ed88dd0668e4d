"""What engines have in common whose sender publishes a version that receivers then fetch: versions, manifests, checks and the cache.

Such an engine says what its metadata look like (`_check_members`), where the bytes of a version are kept (`Place`) and how a receiver gets
them (`_fetch`). Everything else is here.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from rl_ckpt_engine.engine import CheckpointEngineWithCache, Topology
from rl_ckpt_engine.ledger import Published, SendLedger
from rl_ckpt_engine.manifest import Manifest, WeightKind
from rl_ckpt_engine.stream import Deadline, Target, emit
from rl_protocol.errors import WeightSyncError
from rl_protocol.weights import WeightTensor


class Place(Target, Protocol):
    """Where a sender keeps the bytes of one version. Used again for later versions."""

    def begin(self, version: int) -> None:
        """Give up what was kept; bytes of `version` follow."""
        ...

    @property
    def placement(self) -> bytes:
        """How receivers find it, in the engine's encoding; read after the last byte was written."""
        ...

    def complete(self, manifest: Manifest) -> None:
        """All bytes are here: receivers may read."""
        ...

    def withdraw(self) -> None:
        """Receivers may not read any more; without effect when they may not anyway."""
        ...

    def close(self) -> None:
        """Give the memory back; safe to call twice."""
        ...


P = TypeVar("P", bound=Place)


class PublishingEngine(CheckpointEngineWithCache, Generic[P]):
    """See the module's docstring. A sender keeps at most two places, that of the version committed last and one more."""

    def __init__(self) -> None:
        self._ledger: SendLedger[P] = SendLedger()
        self._free: list[P] = []
        self._running: Deadline | None = None
        self._sender: bytes | None = None
        self._received: tuple[Manifest, list[WeightTensor]] | None = None
        self._outlet: CheckpointEngineWithCache | None = None

    # ------------------------------------------------------------------------------------------------------------ to implement

    @classmethod
    @abstractmethod
    def _check_members(cls, sender: bytes, receivers: Sequence[bytes]) -> None:
        """Raise WeightSyncError when a member's metadata can't be read or these can't work together."""

    @abstractmethod
    def _new_place(self) -> P:
        """Room for one version."""

    @abstractmethod
    async def _fetch(self, manifest: Manifest, deadline: Deadline) -> list[WeightTensor]:
        """The tensors of the manifest, each compared with its digest."""

    def _identity(self) -> bytes:
        """What manifests say about who sent them."""
        return self.prepare()

    def _new_outlet(self) -> CheckpointEngineWithCache:
        """An engine like this one, to serve what was received."""
        return type(self)()

    # ------------------------------------------------------------------------------------------------------------ group

    @classmethod
    def build_topology(cls, sender_metadata: bytes, receiver_metadatas: Sequence[bytes]) -> Topology:
        """See CheckpointEngine.build_topology: receivers need to know the sender, and nobody needs to know them."""
        cls._check_members(sender_metadata, receiver_metadatas)
        return Topology(sender=sender_metadata, receivers=(sender_metadata,) * len(receiver_metadatas))

    def init_process_group(self, member: bytes) -> None:
        """See CheckpointEngine.init_process_group."""
        self._check_members(member, [])
        self._sender = member

    # ------------------------------------------------------------------------------------------------------------ sender

    async def send_weights(
        self, weights: Iterable[WeightTensor], version: int, *, timeout_s: float, kind: WeightKind = "full"
    ) -> Manifest:
        """See CheckpointEngine.send_weights."""
        self._ledger.begin(version)
        place: P | None = None
        try:
            self._running = Deadline(timeout_s, f"Sending version {version}", f"engine {self.name}")
            place = self._free.pop() if self._free else self._new_place()
            manifest = await self._fill(place, weights, version, kind, self._running)
            self._ledger.publish(Published(version, manifest.sync_id, place))
            place = None
            return manifest
        except OSError as error:
            raise WeightSyncError(
                f"Sending version {version} (engine {self.name}) failed: {error}. Is there memory or disk left?"
            ) from error
        finally:
            if place is not None:
                place.withdraw()
                self._free.append(place)
            self._ledger.cancel()
            self._running = None

    def finalize(self, version: int) -> None:
        """See CheckpointEngine.finalize."""
        self._recycle(self._ledger.finalize(version))

    def abort(self) -> None:
        """See CheckpointEngine.abort."""
        if self._running is not None:
            self._running.cancel("abort() was called")
        self._recycle(self._ledger.abort())

    async def _fill(
        self, place: P, weights: Iterable[WeightTensor], version: int, kind: WeightKind, deadline: Deadline
    ) -> Manifest:
        place.begin(version)
        entries = await emit(weights, place, deadline)
        manifest = Manifest.new(
            entries,
            version=version,
            engine=self.name,
            kind=kind,
            sender=self._identity(),
            placement=place.placement,
        )
        place.complete(manifest)
        return manifest

    def _recycle(self, published: Published[P] | None) -> None:
        if published is not None:
            published.held.withdraw()
            self._free.append(published.held)

    # ------------------------------------------------------------------------------------------------------------ receiver

    async def receive_weights(self, manifest: Manifest, *, timeout_s: float) -> list[WeightTensor]:
        """See CheckpointEngine.receive_weights."""
        deadline = Deadline(
            timeout_s, f"Receiving version {manifest.version}", f"process {os.getpid()}, engine {self.name}"
        )
        self._check_joined(manifest)
        deadline.check()
        self._received = None
        weights = await self._fetch(manifest, deadline)
        self._require_there(manifest)
        self._received = (manifest, weights)
        return weights

    def confirm(self, manifest: Manifest) -> None:
        """See CheckpointEngine.confirm."""
        if self._received is None or self._received[0].sync_id != manifest.sync_id:
            raise WeightSyncError(f"Version {manifest.version} was not received here; nothing can be confirmed.")
        self._require_there(manifest)

    def _require_there(self, manifest: Manifest) -> None:
        """Raise WeightSyncError when the sender has given up what was received; a copy belongs to the receiver and stays."""

    def get_weights(self) -> tuple[Manifest, list[WeightTensor]]:
        """See CheckpointEngineWithCache.get_weights."""
        if self._received is None:
            raise WeightSyncError(f"This engine {self.name!r} has received no version that it could serve.")
        self.confirm(self._received[0])
        return self._received

    async def republish(self, *, timeout_s: float) -> Manifest:
        """See CheckpointEngineWithCache.republish; costs one copy of the weights, kept until the next call or `close`."""
        received, weights = self.get_weights()
        self._close_outlet()
        self._outlet = self._new_outlet()
        manifest = await self._outlet.send_weights(weights, received.version, timeout_s=timeout_s, kind=received.kind)
        self.confirm(received)
        if not manifest.same_weights(received):
            self._close_outlet()
            raise WeightSyncError(
                f"The weights of version {received.version} changed while they were copied for others."
            )
        self._outlet.finalize(received.version)
        return manifest

    def _check_joined(self, manifest: Manifest) -> None:
        if self._sender is None or manifest.sender != self._sender:
            raise WeightSyncError(
                "The manifest comes from a sender this receiver has not joined; call init_process_group."
            )

    # ------------------------------------------------------------------------------------------------------------ end

    def close(self) -> None:
        """See CheckpointEngine.close."""
        self._close_outlet()
        self._received = None
        self.abort()
        if self._ledger.committed is not None:
            self._free.append(self._ledger.committed.held)
            self._ledger.committed = None
        for place in self._free:
            place.close()
        self._free.clear()

    def _close_outlet(self) -> None:
        if self._outlet is not None:
            self._outlet.close()
            self._outlet = None
