"""The process-side halves of a synchronisation: an engine joined to a source or a sink of weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from rl_ckpt_engine.cast import cast_all, check_cast
from rl_ckpt_engine.engine import (
    CheckpointEngine,
    CheckpointEngineWithCache,
    DirectEngine,
    GroupEngine,
    SharingEngine,
    TensorSpec,
)
from rl_ckpt_engine.handles import Memory, ReceiveAck
from rl_ckpt_engine.manifest import Manifest, WeightKind
from rl_protocol.errors import ConfigError, WeightSyncError
from rl_protocol.ports import WeightReceiver, WeightSender
from rl_protocol.weights import WeightTensor

_TORN = "may hold weights of two versions, a load broke off midway"


@runtime_checkable
class AdapterReceiver(Protocol):
    """A sink that takes adapters apart from the weights they belong to."""

    def load_adapter(self, weights: Iterable[WeightTensor], version: int) -> None:
        """Copy a verified LoRA adapter in, in place of the one before, and make it active as `version`. Errors as of `load_weights`."""
        ...


@runtime_checkable
class AdoptingReceiver(Protocol):
    """A sink that can compute with weights where they lie, without a copy of its own."""

    def adopt_weights(self, weights: Iterable[WeightTensor], version: int, watch: Callable[[], None]) -> None:
        """As `load_weights`, but the tensors are used where they are. They are read-only.

        Args:
            weights: all of them, verified.
            version: their version.
            watch: raises WeightSyncError once the sender may have written over them. It MUST be called after each use, before anything
                that was computed with them is handed out.
        """
        ...


@runtime_checkable
class DirectSender(Protocol):
    """A source that writes its tensors where they are sent from, and so keeps no copy for the engine to copy from."""

    def layout(self) -> Sequence[TensorSpec]:
        """All tensors, in their order."""
        ...

    def write_weights(self, room: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Write the newest weights: for each tensor of the layout its bytes, in C order, into uint8 [nbytes]."""
        ...


@runtime_checkable
class PausableReceiver(Protocol):
    """A sink whose running requests can be ended."""

    async def pause(self) -> None:
        """End what runs and admit nothing."""
        ...

    async def resume(self) -> None:
        """Admit requests again."""
        ...


@runtime_checkable
class SleepingReceiver(Protocol):
    """A sink that can give memory back."""

    async def sleep(self, level: Literal[1, 2]) -> None:
        """See SleepingHandle.sleep."""
        ...

    async def wake(self, part: Memory | None = None) -> None:
        """See SleepingHandle.wake."""
        ...


class _Endpoint:
    def __init__(self, engine: CheckpointEngine) -> None:
        if not (engine.capabilities.elastic or isinstance(engine, GroupEngine)):
            raise ConfigError(
                f"Engine {engine.name!r} is neither elastic nor a GroupEngine, so its members can't be brought together. "
                "Set checkpoint_engine.backend to shm or tcp."
            )
        self._engine = engine

    @property
    def _group(self) -> GroupEngine:
        if not isinstance(self._engine, GroupEngine):
            raise WeightSyncError(f"Engine {self._engine.name!r} forms no group.")
        return self._engine

    @property
    def _cache(self) -> CheckpointEngineWithCache:
        if not isinstance(self._engine, CheckpointEngineWithCache):
            raise WeightSyncError(f"Engine {self._engine.name!r} keeps nothing for others.")
        return self._engine

    async def prepare(self) -> bytes:
        """See CheckpointEngine.prepare."""
        return self._engine.prepare()

    async def join(self, member: bytes, timeout_s: float) -> None:
        """Join a group; see GroupEngine.join."""
        self._engine.init_process_group(member)
        await self._group.join(timeout_s=timeout_s)


class SenderEndpoint(_Endpoint):
    """Methods of SenderHandle over an engine and whoever has the weights.

    Args:
        engine: one of this endpoint's own; closed with it.
        source: asked for its weights once per send; a DirectSender writes them itself when the engine is a DirectEngine
            and nothing is cast. Its iterator is closed before `send` returns, so a context that it holds open (adapters
            merged into the weights, say) covers exactly the reading.
        kind: `lora`: the source yields an adapter.
        must_change: an adapter must differ from the one sent before; without, an update that learnt nothing is sent like any other.
        dtype: send floating-point tensors as this type, see rl_ckpt_engine.cast; empty: as they are.

    Raises:
        ConfigError: the engine is neither elastic nor a GroupEngine, or there is no such type to cast to.
    """

    def __init__(
        self,
        engine: CheckpointEngine,
        source: WeightSender,
        *,
        kind: WeightKind = "full",
        dtype: str = "",
        must_change: bool = True,
    ) -> None:
        super().__init__(engine)
        check_cast(dtype)
        self._dtype = dtype
        self._source = source
        self._kind: WeightKind = kind
        self._must_change = must_change
        self._sent: Manifest | None = None
        self._committed: Manifest | None = None
        if engine.capabilities.elastic:
            engine.init_process_group(engine.build_topology(engine.prepare(), []).sender)

    async def send(self, version: int, timeout_s: float) -> bytes:
        """Publish the source's weights; returns the encoded Manifest.

        Raises:
            WeightSyncError: see CheckpointEngine.send_weights; or the adapter did not change.
        """
        with closing(self._weights()) as weights:
            manifest = await self._engine.send_weights(weights, version, timeout_s=timeout_s, kind=self._kind)
        last = self._committed
        if self._kind == "lora" and self._must_change and last is not None and last.identity == manifest.identity:
            self._engine.abort()
            raise WeightSyncError(
                f"The adapter of version {version} is bit for bit that of version {last.version}: the trainer did not train it, or sends the "
                "wrong tensors. Check which parameters the optimizer has."
            )
        self._sent = manifest
        return manifest.encode()

    def _weights(self) -> Generator[WeightTensor]:
        if self._dtype:
            return cast_all(self._source.named_weights(), self._dtype)
        if not (isinstance(self._engine, DirectEngine) and isinstance(self._source, DirectSender)):
            return _iterated(self._source.named_weights())
        layout = self._source.layout()
        room = self._engine.room(layout)
        self._source.write_weights(room)
        return _iterated([WeightTensor(*spec, data) for spec, data in zip(layout, room, strict=True)])

    async def serve(self, manifest: bytes, timeout_s: float) -> None:
        """See GroupEngine.serve."""
        await self._group.serve(Manifest.decode(manifest), timeout_s=timeout_s)

    async def finalize(self, version: int) -> None:
        """See CheckpointEngine.finalize."""
        self._engine.finalize(version)
        if self._sent is not None and self._sent.version == version:
            self._committed = self._sent

    async def abort(self) -> None:
        """See CheckpointEngine.abort."""
        self._engine.abort()

    async def republish(self, timeout_s: float) -> bytes:
        """Serve the version committed last to late joiners in full; see CheckpointEngineWithCache.

        Raises:
            WeightSyncError: there is none, or the engine keeps nothing.
        """
        return (await self._cache.republish(timeout_s=timeout_s)).encode()

    def close(self) -> None:
        """Release the engine; safe to call twice."""
        self._engine.close()


class ReceiverEndpoint(_Endpoint):
    """Methods of ReceiverHandle over an engine and whoever generates.

    The owner asks `admitting` before it takes a request. It may not be while a version is loaded, after one that could not be, and while the
    endpoint is paused. A load that broke off midway leaves weights of no version: then `resume` refuses until a later activation succeeds. A
    sink that is a PausableReceiver or a SleepingReceiver is asked to do those things itself. Where the engine is a SharingEngine, an
    AdoptingReceiver is lent the tensors instead of being told to load them.

    Args:
        engine: one of this endpoint's own; closed with it.
        sink: must copy what it loads (but see AdoptingReceiver): the tensors are shared memory that the sender writes again.
        name: of the replica, unique among them.

    Raises:
        ConfigError: the engine is neither elastic nor a GroupEngine.
    """

    def __init__(self, engine: CheckpointEngine, sink: WeightReceiver, *, name: str = "receiver") -> None:
        super().__init__(engine)
        self._sink = sink
        self._name = name
        self._sender = b""
        self._staged: tuple[Manifest, list[WeightTensor]] | None = None
        self._paused = False
        self._behind = False
        self._unfit = ""  # why the weights are of no version
        self._watch: Callable[[], None] | None = None  # of weights that were lent to the sink

    @property
    def name(self) -> str:
        """Name of the replica."""
        return self._name

    @property
    def admitting(self) -> bool:
        """Whether requests may be taken."""
        return not (self._paused or self._behind or self._unfit)

    async def pause(self, timeout_s: float) -> None:
        """Stop admitting, and end what runs where the sink can do that."""
        self._paused = True
        if isinstance(self._sink, PausableReceiver):
            async with asyncio.timeout(timeout_s):
                await self._sink.pause()

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
        if self._engine.capabilities.elastic:
            self._join(wanted.sender)
        weights = await self._engine.receive_weights(wanted, timeout_s=timeout_s)
        self._staged = (wanted, weights)
        return ReceiveAck(
            version=wanted.version,
            digest=wanted.digest,
            seconds=time.monotonic() - start,
            verify_seconds=self._engine.verify_seconds,
        )

    async def activate(self, version: int, timeout_s: float) -> int:
        """Load what was received and drop it; returns the version. Loading runs in the calling thread and is not interrupted.

        Nothing is admitted after a failure, until `resume` or an activation that succeeds.

        Raises:
            WeightSyncError: `version` was not received, the sender has given it up, or the sink refuses it. The active weights stay,
                except when the sender gave it up during loading: the message says so, and `resume` refuses.
        """
        del timeout_s
        self._behind = True
        staged, self._staged = self._staged, None
        if staged is None or staged[0].version != version:
            held = "nothing" if staged is None else f"version {staged[0].version}"
            raise WeightSyncError(f"Replica {self._name!r} can't activate version {version}: it has received {held}.")
        manifest, weights = staged
        self._engine.confirm(manifest)
        self._load(manifest, weights)
        try:
            self._engine.confirm(manifest)
        except WeightSyncError as error:
            self._unfit = _TORN
            raise WeightSyncError(f"Replica {self._name!r} was loading version {version}. {error}") from error
        if self._sink.weight_version != version:
            self._unfit = _TORN
            raise WeightSyncError(
                f"Replica {self._name!r} loaded version {version}, yet reports version {self._sink.weight_version}."
            )
        self._behind = False
        return version

    async def resume(self, timeout_s: float) -> None:
        """Admit requests again.

        Raises:
            WeightSyncError: the last load broke off midway, or the weights were given up.
        """
        if self._unfit:
            raise WeightSyncError(f"Replica {self._name!r} {self._unfit}; it admits nothing until a sync succeeds.")
        if self._watch is not None:
            self._watch()
        if self._paused and isinstance(self._sink, PausableReceiver):
            async with asyncio.timeout(timeout_s):
                await self._sink.resume()
        self._paused = self._behind = False

    async def sleep(self, level: int, timeout_s: float) -> None:
        """Give memory back; see SleepingHandle.

        Raises:
            WeightSyncError: the sink keeps its memory, or knows no such level.
            RLError: whatever the sink raises.
        """
        if level not in (1, 2):
            raise WeightSyncError(f"Replica {self._name!r}: there is no level {level} of sleep; levels are 1 and 2.")
        async with asyncio.timeout(timeout_s):
            await self._sleeper.sleep(level)
        if level == 2:
            self._unfit = "has given its weights up"

    async def wake(self, part: Memory | None, timeout_s: float) -> None:
        """Have memory again; errors as of `sleep`."""
        async with asyncio.timeout(timeout_s):
            await self._sleeper.wake(part)

    @property
    def _sleeper(self) -> SleepingReceiver:
        if not isinstance(self._sink, SleepingReceiver):
            raise WeightSyncError(
                f"Replica {self._name!r} can't sleep or wake: {type(self._sink).__name__} keeps its memory; it has no methods sleep and wake."
            )
        return self._sink

    async def republish(self, timeout_s: float) -> bytes:
        """Serve what was received last to late joiners; see CheckpointEngineWithCache.

        Raises:
            WeightSyncError: the active version is not what was received last, it is gone, or the engine keeps nothing.
        """
        manifest = await self._cache.republish(timeout_s=timeout_s)
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

    def _load(self, manifest: Manifest, weights: list[WeightTensor]) -> None:
        before, self._unfit = self._unfit, _TORN
        version = manifest.version
        try:
            if manifest.kind == "full":
                if isinstance(self._engine, SharingEngine) and isinstance(self._sink, AdoptingReceiver):
                    watch = self._engine.watch(manifest)
                    self._sink.adopt_weights(weights, version, watch)
                    self._watch = watch
                else:
                    self._sink.load_weights(weights, version)
            elif isinstance(self._sink, AdapterReceiver):
                self._sink.load_adapter(weights, version)
            else:
                raise WeightSyncError(
                    f"Replica {self._name!r} can't take version {version}, an adapter: {type(self._sink).__name__} has no load_adapter. Merge "
                    "the adapter into the weights before they are sent."
                )
            self._unfit = ""
        except WeightSyncError:  # the sink's promise: the old weights stay
            self._unfit = before
            raise


def _iterated(weights: Iterable[WeightTensor]) -> Generator[WeightTensor]:
    """The weights, from an iterator that closing this one closes."""
    iterator = iter(weights)
    try:
        yield from iterator
    finally:
        if isinstance(iterator, Generator):
            iterator.close()
