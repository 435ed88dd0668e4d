"""The process-side halves of a synchronisation: an engine joined to a source or a sink of weights."""

from __future__ import annotations

import time

from rl_ckpt_engine.engine import CheckpointEngine, CheckpointEngineWithCache
from rl_ckpt_engine.handles import ReceiveAck
from rl_ckpt_engine.manifest import Manifest
from rl_protocol.errors import ConfigError, WeightSyncError
from rl_protocol.ports import WeightReceiver, WeightSender
from rl_protocol.weights import WeightTensor


class SenderEndpoint:
    """Methods of SenderHandle over an engine and whoever has the weights.

    Args:
        engine: one of this endpoint's own; closed with it.
        source: asked for its weights once per send.

    Raises:
        ConfigError: the engine needs a group of fixed size, which endpoints do not form.
    """

    def __init__(self, engine: CheckpointEngine, source: WeightSender) -> None:
        _require_elastic(engine)
        self._engine = engine
        self._source = source
        engine.init_process_group(engine.build_topology(engine.prepare(), []).sender)

    async def send(self, version: int, timeout_s: float) -> bytes:
        """Publish the source's weights; returns the encoded Manifest.

        Raises:
            WeightSyncError: see CheckpointEngine.send_weights.
        """
        manifest = await self._engine.send_weights(self._source.named_weights(), version, timeout_s=timeout_s)
        return manifest.encode()

    async def finalize(self, version: int) -> None:
        """See CheckpointEngine.finalize."""
        self._engine.finalize(version)

    async def abort(self) -> None:
        """See CheckpointEngine.abort."""
        self._engine.abort()

    def close(self) -> None:
        """Release the engine; safe to call twice."""
        self._engine.close()


class ReceiverEndpoint:
    """Methods of ReceiverHandle over an engine and whoever generates.

    The owner asks `admitting` before it takes a request. A load that broke off midway leaves weights of no version: then `resume`
    refuses until a later activation succeeds.

    Args:
        engine: one of this endpoint's own; closed with it.
        sink: must copy what it loads, the tensors are shared memory that the sender writes again.
        name: of the replica, unique among them.

    Raises:
        ConfigError: the engine needs a group of fixed size, which endpoints do not form.
    """

    def __init__(self, engine: CheckpointEngine, sink: WeightReceiver, *, name: str = "receiver") -> None:
        _require_elastic(engine)
        self._engine = engine
        self._sink = sink
        self._name = name
        self._sender = b""
        self._staged: tuple[Manifest, list[WeightTensor]] | None = None
        self._admitting = True
        self._torn = False

    @property
    def name(self) -> str:
        """Name of the replica."""
        return self._name

    @property
    def admitting(self) -> bool:
        """Whether requests may be taken."""
        return self._admitting

    async def pause(self, timeout_s: float) -> None:
        """Stop admitting. The owner lets requests that run finish, or aborts them, before it forwards this call."""
        del timeout_s
        self._admitting = False

    async def receive(self, manifest: bytes, timeout_s: float) -> ReceiveAck:
        """Get and verify the weights of the manifest, and keep them aside.

        Raises:
            WeightSyncError: the manifest is damaged, of another engine or older than the active weights; see also
                CheckpointEngine.receive_weights. The active weights stay.
        """
        start = time.monotonic()
        self._staged = None
        wanted = Manifest.decode(manifest)
        if wanted.engine != self._engine.name:
            raise WeightSyncError(
                f"Replica {self._name!r} receives with engine {self._engine.name!r}, the sender sent with {wanted.engine!r}; "
                "set the same checkpoint_engine.backend for both."
            )
        if wanted.version < self._sink.weight_version:
            raise WeightSyncError(
                f"Replica {self._name!r} has version {self._sink.weight_version}; the older version {wanted.version} is refused."
            )
        self._join(wanted.sender)
        weights = await self._engine.receive_weights(wanted, timeout_s=timeout_s)
        self._staged = (wanted, weights)
        return ReceiveAck(version=wanted.version, digest=wanted.digest, seconds=time.monotonic() - start)

    async def activate(self, version: int, timeout_s: float) -> int:
        """Load what was received and drop it; returns the version. Loading runs in the calling thread and is not interrupted.

        Raises:
            WeightSyncError: `version` was not received, the sender has given it up, or the sink refuses it. The active weights stay,
                except when the sender gave it up during loading: the message says so, and `resume` refuses.
        """
        del timeout_s
        staged, self._staged = self._staged, None
        if staged is None or staged[0].version != version:
            held = "nothing" if staged is None else f"version {staged[0].version}"
            raise WeightSyncError(f"Replica {self._name!r} can't activate version {version}: it has received {held}.")
        manifest, weights = staged
        self._engine.confirm(manifest)
        self._load(weights, version)
        try:
            self._engine.confirm(manifest)
        except WeightSyncError as error:
            self._torn = True
            raise WeightSyncError(f"Replica {self._name!r} was loading version {version}. {error}") from error
        if self._sink.weight_version != version:
            self._torn = True
            raise WeightSyncError(
                f"Replica {self._name!r} loaded version {version}, yet reports version {self._sink.weight_version}."
            )
        return version

    async def resume(self, timeout_s: float) -> None:
        """Admit requests again.

        Raises:
            WeightSyncError: the last load broke off midway.
        """
        del timeout_s
        if self._torn:
            raise WeightSyncError(
                f"Replica {self._name!r} may hold weights of two versions, a load broke off midway; it admits nothing until a sync succeeds."
            )
        self._admitting = True

    async def republish(self, timeout_s: float) -> bytes:
        """Serve what was received last to late joiners; see CheckpointEngineWithCache.

        Raises:
            WeightSyncError: the active version is not what was received last, it is gone, or the engine keeps nothing.
        """
        if not isinstance(self._engine, CheckpointEngineWithCache):
            raise WeightSyncError(f"Replica {self._name!r}: engine {self._engine.name!r} keeps nothing for others.")
        manifest = await self._engine.republish(timeout_s=timeout_s)
        if manifest.version != self._sink.weight_version:
            raise WeightSyncError(
                f"Replica {self._name!r} has received version {manifest.version}, which is not active."
            )
        return manifest.encode()

    def close(self) -> None:
        """Drop what was received and release the engine; safe to call twice."""
        self._staged = None
        self._engine.close()

    def _join(self, sender: bytes) -> None:
        if sender != self._sender:
            topology = self._engine.build_topology(sender, [self._engine.prepare()])
            self._engine.init_process_group(topology.receivers[0])
            self._sender = sender

    def _load(self, weights: list[WeightTensor], version: int) -> None:
        was_torn, self._torn = self._torn, True
        try:
            self._sink.load_weights(weights, version)
            self._torn = False
        except WeightSyncError:  # the sink's promise: the old weights stay
            self._torn = was_torn
            raise


def _require_elastic(engine: CheckpointEngine) -> None:
    if not engine.capabilities.elastic:
        raise ConfigError(
            f"Engine {engine.name!r} needs a group of fixed size; the endpoints of this package join receivers one by one. "
            "Set checkpoint_engine.backend to shm or naive."
        )
