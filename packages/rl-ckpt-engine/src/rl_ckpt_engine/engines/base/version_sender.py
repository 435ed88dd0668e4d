"""VersionSender: writes versions to stores that receivers read, and keeps the last one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic, Protocol, TypeVar

from rl_ckpt_engine.engines.base.sent_versions import Published, SentVersions
from rl_ckpt_engine.payload.block_stream import Deadline, Target, emit
from rl_ckpt_engine.payload.manifest import Manifest, WeightKind
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError


class VersionStore(Target, Protocol):
    """Holds the bytes of one version at the sender; reused for later versions."""

    def begin(self, version: int) -> None:
        """Drop the previous contents; the bytes of `version` follow."""
        ...

    @property
    def placement(self) -> bytes:
        """How receivers find the bytes, in the engine's encoding; read after the last byte is
        written."""
        ...

    def complete(self, manifest: Manifest) -> None:
        """Mark the version complete: receivers may read."""
        ...

    def withdraw(self) -> None:
        """Make the version unreadable for receivers; idempotent."""
        ...

    def close(self) -> None:
        """Free the memory; safe to call twice."""
        ...


P = TypeVar("P", bound=VersionStore)


class VersionSender(Generic[P]):
    """The sender's side of an engine; has at most two stores, one committed and one for the next.

    Args:
        engine: name of the engine, for manifests and messages.
        new_store: creates the store for one version.
        identity: the sender's metadata for manifests.
        on_progress: called while a version is written, with its store and the number of bytes, from
            the start of the payload, that are there.

    Attributes:
        versions: the versions that receivers may read.
        free: stores without a version; the last one is used next.
    """

    def __init__(
        self,
        engine: str,
        new_store: Callable[[], P],
        identity: Callable[[], bytes],
        on_progress: Callable[[P, int], None] | None = None,
    ) -> None:
        self._engine = engine
        self._new_store = new_store
        self._identity = identity
        self._on_progress = on_progress
        self._filling: P | None = None
        self._running: Deadline | None = None
        self.versions: SentVersions[P] = SentVersions()
        self.free: list[P] = []

    async def send(
        self, weights: Iterable[WeightTensor], version: int, *, timeout_s: float, kind: WeightKind
    ) -> Manifest:
        """See `CheckpointEngine.send_weights`."""
        self.versions.begin(version)
        store: P | None = None
        try:
            self._running = Deadline(timeout_s, f"Sending version {version}", f"engine {self._engine}")
            store = self._filling = self.free.pop() if self.free else self._new_store()
            manifest = await self._fill(store, weights, version, kind, self._running)
            self.versions.publish(Published(version, manifest.sync_id, store))
            store = None
            return manifest
        except OSError as error:
            raise WeightSyncError(
                f"Sending version {version} (engine {self._engine}) failed: {error}. Is there memory or disk left?"
            ) from error
        finally:
            closed = self._filling is None
            self.versions.cancel()
            self._running = self._filling = None
            if store is not None:
                store.withdraw()  # may fail, for example if the actor of engine `ray` is gone
                if closed:
                    store.close()
                else:
                    self.free.append(store)

    @property
    def newest(self) -> P | None:
        """The store of the version that is being sent, or was sent last; None before the first."""
        if self._filling is not None:
            return self._filling
        published = self.versions.pending or self.versions.committed
        return None if published is None else published.held

    def finalize(self, version: int) -> None:
        """See `CheckpointEngine.finalize`."""
        self.recycle(self.versions.finalize(version))

    def abort(self) -> None:
        """See `CheckpointEngine.abort`."""
        if self._running is not None:
            self._running.cancel("abort() was called")
        self.recycle(self.versions.abort())

    def recycle(self, published: Published[P] | None) -> None:
        """Withdraw a version and keep its store for a later one; no effect without a version."""
        if published is not None:
            published.held.withdraw()
            self.free.append(published.held)

    def close(self) -> None:
        """Withdraw all versions and free the memory; safe to call twice.

        A running send fails, and frees its store when it ends.
        """
        self.abort()
        self._filling = None
        if self.versions.committed is not None:
            self.free.append(self.versions.committed.held)
            self.versions.committed = None
        for store in self.free:
            store.close()
        self.free.clear()

    async def _fill(
        self, store: P, weights: Iterable[WeightTensor], version: int, kind: WeightKind, deadline: Deadline
    ) -> Manifest:
        store.begin(version)
        written = None if self._on_progress is None else partial(self._on_progress, store)
        entries = await emit(weights, store, deadline, written)
        manifest = Manifest.new(
            entries,
            version=version,
            engine=self._engine,
            kind=kind,
            sender=self._identity(),
            placement=store.placement,
        )
        store.complete(manifest)
        return manifest
