"""ReceiverEndpoint: connects an engine to a replica's sink of weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias, TypeVar, cast

import msgspec

from rl_ckpt_engine.endpoints.base import EngineEndpoint
from rl_ckpt_engine.endpoints.operations import operation
from rl_ckpt_engine.endpoints.weight_sinks import (
    AdapterReceiver,
    AdoptingReceiver,
    PausableReceiver,
    SleepingReceiver,
    check_methods,
)
from rl_ckpt_engine.engines.contract import CheckpointEngine
from rl_ckpt_engine.payload.manifest import Manifest
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError
from rl_protocol.ports import Memory, WeightReceiver
from rl_protocol.support.host_identity import this_host

T = TypeVar("T")
_TORN = "may hold weights of two versions because a load failed midway"


class ReceiveAck(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Acknowledgment: the receiver holds a complete, verified version that is not active yet."""

    version: int
    digest: bytes
    """Digest of the received manifest."""
    seconds: float
    """Seconds the receiver spent."""
    verify_seconds: float = 0.0
    """Part of `seconds` spent on digests."""
    prefetches: bool = False
    """Whether the receiver can receive the next version while the sender sends it."""
    prefetched_nbytes: int = 0
    """Bytes that were there before, by `prefetch`."""
    host: str = ""
    """Host of the receiver if it can relay the version to others there; else empty."""
    relayed: bool = False
    """Whether another receiver of the host has relayed the version."""


class ReceiverEndpoint(EngineEndpoint):
    """Connects an engine to the sink of one rollout replica.

    The replica checks `admitting` before it accepts a request. It is false while a version is
    loaded, after a failed load, and while the endpoint is paused. A load that fails midway leaves
    weights of mixed versions; then `resume` raises until a later activation succeeds. Pausing and
    sleeping are forwarded to a sink that declares `pauses` or `sleeps`. With an engine that
    declares `shares`, a sink that declares `adopts` uses the tensors in place, unless they are in a
    buffer of the receiver and the sink declares `drops_weights`.

    The engine does one thing at a time. A call that still runs when the next one arrives, since its
    caller did not wait for it, is stopped first.

    Args:
        engine: used by this endpoint only and closed with it.
        sink: must copy the tensors it loads (except those it adopts): the sender overwrites their
            memory later.
        name: unique name of the replica.

    Raises:
        ConfigError: the engine or the sink lacks what it declares.
    """

    def __init__(self, engine: CheckpointEngine, sink: WeightReceiver, *, name: str = "receiver") -> None:
        super().__init__(engine)
        check_methods(sink)
        self._sink = sink
        self._name = name
        self._sender = b""
        self._staged: tuple[Manifest, list[WeightTensor]] | None = None
        self._paused = False
        self._behind = False
        self._unfit = ""  # why the weights can't be used; empty: they can
        self._watch: Callable[[], None] | None = None  # checks weights that the sink uses in place
        self._running: asyncio.Future[Any] | None = None  # the last call of the engine

    @property
    def name(self) -> str:
        """Name of the replica."""
        return self._name

    @property
    def admitting(self) -> bool:
        """Whether the replica may accept requests."""
        return not (self._paused or self._behind or self._unfit)

    @operation
    async def pause(self, timeout_s: float) -> None:
        """Stop admitting requests, and abort running ones if the sink can."""
        self._paused = True
        if self._sink.capabilities.pauses:
            async with asyncio.timeout(timeout_s):
                await cast("PausableReceiver", self._sink).pause()

    @operation
    async def prefetch(self, version: int, timeout_s: float) -> None:
        """Start to receive `version` while the sender is in `send`; see CheckpointEngine.prefetch.

        Raises:
            WeightSyncError: the engine can't.
        """
        await self._stop_running(timeout_s)
        self._staged = None
        await self._run(self._engine.prefetch(version, timeout_s=timeout_s))

    @operation
    async def receive(self, manifest: bytes, timeout_s: float) -> ReceiveAck:
        """Receive and verify the weights of the manifest without activating them.

        Raises:
            WeightSyncError: the manifest is damaged, from another engine, older than the active
                weights, or of an adapter that the sink can't load; see also
                CheckpointEngine.receive_weights. The active weights stay.
        """
        start = time.monotonic()
        await self._stop_running(timeout_s)
        self._staged = None
        wanted = Manifest.decode(manifest)
        if wanted.engine != self._engine.name:
            raise WeightSyncError(
                f"Replica {self._name!r} receives with engine {self._engine.name!r}, the sender sent with {wanted.engine!r}; "
                "set the same CheckpointEngineConfig.backend for both."
            )
        if wanted.kind == "lora" and not self._sink.capabilities.adapters:
            raise WeightSyncError(
                f"Replica {self._name!r} can't load version {wanted.version}, an adapter: {type(self._sink).__name__} does not declare adapters "
                "in its capabilities. Merge the adapter into the weights before sending."
            )
        if wanted.version < self._sink.weight_version:
            raise WeightSyncError(
                f"Replica {self._name!r} has version {self._sink.weight_version}; the older version {wanted.version} is refused."
            )
        if self._engine.capabilities.elastic:
            self._join(wanted.sender)
        weights = await self._run(self._engine.receive_weights(wanted, timeout_s=timeout_s))
        self._staged = (wanted, weights)
        return ReceiveAck(
            version=wanted.version,
            digest=wanted.digest,
            seconds=time.monotonic() - start,
            verify_seconds=self._engine.verify_seconds,
            prefetches=self._engine.capabilities.prefetches,
            prefetched_nbytes=self._engine.prefetched_nbytes,
            host=this_host() if self._engine.capabilities.relays else "",
            relayed=self._engine.relayed,
        )

    @operation
    async def activate(self, version: int, timeout_s: float) -> int:
        """Load the received weights into the sink; returns the version. Runs in the calling thread,
        uninterrupted.

        After a failure no request is admitted until `resume` or a successful activation.

        Raises:
            WeightSyncError: `version` was not received, the sender has dropped it, or the sink
                refuses it. The active weights stay, unless the sender dropped the version during
                loading; then `resume` raises, too.
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

    @operation
    async def resume(self, timeout_s: float) -> None:
        """Admit requests again.

        Raises:
            WeightSyncError: the last load failed midway, or the weights were dropped.
        """
        if self._unfit:
            raise WeightSyncError(f"Replica {self._name!r} {self._unfit}; it admits nothing until a sync succeeds.")
        if self._watch is not None:
            self._watch()
        if self._paused and self._sink.capabilities.pauses:
            async with asyncio.timeout(timeout_s):
                await cast("PausableReceiver", self._sink).resume()
        self._paused = self._behind = False

    @operation
    async def sleep(self, level: int, timeout_s: float) -> int | None:
        """Free memory until `wake`; returns the bytes freed, None if the sink does not count them.

        Level 1 offloads the weights; level 2 drops them, so they must be sent again. A sink that
        can't drop them sleeps at level 1.

        Raises:
            WeightSyncError: the sink can't sleep, or the level is unknown.
            RLError: raised by the sink.
        """
        if level not in (1, 2):
            raise WeightSyncError(f"Replica {self._name!r}: there is no level {level} of sleep; levels are 1 and 2.")
        sleeper = self._sleeper
        drops = level == 2 and self._sink.capabilities.drops_weights
        if drops:
            self._unfit = "has dropped its weights"
        async with asyncio.timeout(timeout_s):
            return await sleeper.sleep(2 if drops else 1)

    @operation
    async def wake(self, part: Memory | None, timeout_s: float) -> None:
        """Restore one part of the memory, or all of it. Raises like `sleep`."""
        async with asyncio.timeout(timeout_s):
            await self._sleeper.wake(part)

    @property
    def _sleeper(self) -> SleepingReceiver:
        if not self._sink.capabilities.sleeps:
            raise WeightSyncError(
                f"Replica {self._name!r} can't sleep or wake: {type(self._sink).__name__} does not declare sleeps in its capabilities."
            )
        return cast("SleepingReceiver", self._sink)

    @operation
    async def republish(self, timeout_s: float) -> bytes:
        """Serve the version received last to late joiners; see CheckpointEngine.republish.

        Raises:
            WeightSyncError: that version is not active or is gone, or the engine has no cache.
        """
        await self._stop_running(timeout_s)
        manifest = await self._run(self._engine.republish(timeout_s=timeout_s))
        if manifest.version != self._sink.weight_version:
            raise WeightSyncError(
                f"Replica {self._name!r} has received version {manifest.version}, which is not active."
            )
        return manifest.encode()

    @operation
    async def relay(self, timeout_s: float) -> bytes:
        """Serve the version received last to the other replicas of this host; see
        CheckpointEngine.relay."""
        await self._stop_running(timeout_s)
        return (await self._run(self._engine.relay(timeout_s=timeout_s))).encode()

    def close(self) -> None:
        """Drop received weights and close the engine; safe to call twice."""
        self._staged = None
        super().close()

    async def _stop_running(self, timeout_s: float) -> None:
        """Stop a call of the engine whose caller is gone."""
        while self._running is not None and not self._running.done():
            self._running.cancel()
            if not (await asyncio.wait([self._running], timeout=timeout_s))[0]:
                raise WeightSyncError(f"Replica {self._name!r}: a former call did not stop within {timeout_s:g} s.")

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a call of the engine until it is done, or a later one stops it."""
        self._running = task = asyncio.ensure_future(work)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise WeightSyncError(f"Replica {self._name!r}: a later call stopped this one.") from None

    def _join(self, sender: bytes) -> None:
        if sender != self._sender:
            topology = self._engine.build_topology(sender, [self._engine.prepare()])
            self._engine.init_process_group(topology.receivers[0])
            self._sender = sender

    @property
    def _used_in_place(self) -> bool:
        """Whether the sink uses the received tensors without a copy: not those of a buffer, which a
        sink that drops its weights could not free.
        """
        engine, sink = self._engine.capabilities, self._sink.capabilities
        return engine.shares and sink.adopts and (engine.zero_copy or not sink.drops_weights)

    def _load(self, manifest: Manifest, weights: list[WeightTensor]) -> None:
        before, self._unfit = self._unfit, _TORN
        version = manifest.version
        try:
            if manifest.kind == "lora":
                cast("AdapterReceiver", self._sink).load_adapter(weights, version)
            elif self._used_in_place:
                watch = self._engine.watch(manifest)
                cast("AdoptingReceiver", self._sink).adopt_weights(weights, version, watch)
                self._watch = watch
            else:
                self._sink.load_weights(weights, version)
            self._unfit = ""
        except WeightSyncError:  # the port guarantees that the old weights stay
            self._unfit = before
            raise


ReceiverHandle: TypeAlias = ReceiverEndpoint
"""What the manager calls: an endpoint, or a `remote` handle of one."""
