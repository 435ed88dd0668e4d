"""Brings one version of the weights from the trainer to every rollout replica, or says why not."""

from __future__ import annotations

import asyncio
import logging
import operator
import time
from collections.abc import Iterable, Mapping
from typing import ClassVar

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.endpoints.receiver import ReceiverHandle
from rl_ckpt_engine.endpoints.sender import FollowerEndpoint, SenderHandle
from rl_ckpt_engine.engines.contract import CheckpointEngine
from rl_ckpt_engine.payload.manifest import Manifest
from rl_ckpt_engine.sync.generation import GenerationControl
from rl_ckpt_engine.sync.late_join import LateJoin
from rl_ckpt_engine.sync.peer_calls import call_one, format_failures
from rl_ckpt_engine.sync.process_groups import receive_strategy
from rl_ckpt_engine.sync.progress import ProgressCallback, report_progress
from rl_ckpt_engine.sync.replica_set import ReplicaSet
from rl_ckpt_engine.sync.sync_round import SyncRound
from rl_protocol.errors import WeightSyncError
from rl_protocol.ports import WeightSyncReport

_log = logging.getLogger(__name__)
_GIB = 1 << 30


class CheckpointEngineManager:
    """Implements the WeightSync port for one sender and named receivers.

    A sync sends once, lets all receivers receive and verify, and activates the version on those
    that succeeded. Until then replicas generate with their old weights. A receiver that fails while
    another succeeds is quarantined: it is paused, never called again, and listed in `quarantined`
    until it is removed or added again. If all receivers fail, the version is assumed to be at
    fault: all resume with their old weights and `update_weights` raises. Then only receivers that
    can't resume are quarantined.

    Between syncs, `generation` pauses all replicas, or lets them sleep to free device memory. The
    same rules apply.

    Args:
        sender: handle of the sender.
        receivers: handles of the replicas, with unique names; more may be added later.
        config: `timeout_s` is the deadline of each phase.
        engine: class of the engine; required if its members form a process group.
        progress: called during syncs longer than `progress.QUIET_S`; for example `ProgressBar()`.
        followers: the trainer's other ranks, if they hold parts of the weights.
        local_senders: name of a receiver -> the trainer's rank in its process. These ranks do not
            follow: each sends the version within its process, and all must send equal weights.

    Attributes:
        generation: stops and starts all replicas between syncs.

    Raises:
        ConfigError: two receivers have the same name.
    """

    API_VERSION: ClassVar[int] = 1
    """A manager plug-in sets this in its class body; the registry compares it with
    ENGINE_API_VERSION."""

    def __init__(
        self,
        sender: SenderHandle,
        receivers: Iterable[ReceiverHandle],
        config: CheckpointEngineConfig | None = None,
        engine: type[CheckpointEngine] | None = None,
        progress: ProgressCallback | None = None,
        *,
        followers: Iterable[FollowerEndpoint] = (),
        local_senders: Mapping[str, SenderHandle] | None = None,
    ) -> None:
        self._config = CheckpointEngineConfig() if config is None else config
        self._progress = progress
        self._sender = sender
        self._followers = tuple(followers)
        self._local_senders = local_senders
        self._receive_strategy = receive_strategy(engine, sender, prefetch=self._config.prefetch)
        self._replicas = ReplicaSet(receivers, self._config.timeout_s)
        self._lock = asyncio.Lock()
        self.generation = GenerationControl(self._replicas, self._lock, self._config.timeout_s)
        self._syncing: int | None = None
        self._committed: Manifest | None = None
        self._metrics: dict[str, float] = {}
        self._said_disabled = False

    @property
    def receivers(self) -> tuple[str, ...]:
        """Names of the receivers in use, without those in quarantine."""
        return tuple(self._replicas.in_use)

    @property
    def quarantined(self) -> Mapping[str, str]:
        """Name of each quarantined receiver -> reason. Send them no requests."""
        return self._replicas.quarantined

    @property
    def version(self) -> int | None:
        """The version committed last; None before the first."""
        return None if self._committed is None else self._committed.version

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last successful sync.

        Version and lag (how many versions the replicas were behind), bytes of one copy of the
        model, seconds in total and per phase (until the slowest receiver), GiB per second, number
        of receivers in use, in quarantine, and returned from quarantine since the manager was
        created, and the engine's measurements.
        """
        return dict(self._metrics)

    async def update_weights(self, version: int) -> WeightSyncReport:
        """Send, verify and activate `version` on every receiver.

        Raises:
            WeightSyncError: another sync is running, the version does not increase, there is no
                receiver, the sender failed, or no receiver could activate the version. Receivers
                resume with their old weights.
        """
        if not self._config.enabled:
            return self._disabled_report(version)
        if self._syncing is not None:
            raise WeightSyncError(
                f"Version {version} can't be synchronized while version {self._syncing} is; await that first."
            )
        version = self._checked(version)
        self._syncing = version
        try:
            async with self._lock:
                return await self._update(version)
        finally:
            self._syncing = None

    async def add_receiver(self, handle: ReceiverHandle) -> None:
        """Add a new or quarantined replica and bring it to the version committed last. Waits for a
        running sync.

        Raises:
            ConfigError: a receiver in use has that name.
            WeightSyncError: it could not catch up; it was not added and stays paused.
        """
        async with self._lock:
            self._replicas.check_new(handle.name)
            limit, committed = self._config.timeout_s, self._committed if self._config.enabled else None
            if committed is not None:
                sources = self._replicas.in_use
                await LateJoin(self._sender, sources, committed, limit, self._receive_strategy).run(handle)
            if self.generation.stopped:
                await call_one("pause", handle.name, limit, lambda: handle.pause(limit))
            elif committed is not None:
                await call_one("resume", handle.name, limit, lambda: handle.resume(limit))
            self._replicas.add(handle)

    def quarantine(self, name: str, reason: str) -> None:
        """Quarantine a receiver that died between two syncs. An earlier reason is kept.

        Raises:
            ConfigError: there is no receiver of that name.
        """
        self._replicas.check_known(name)
        self._replicas.quarantine({name: reason})

    def remove_receiver(self, name: str) -> None:
        """Remove a replica, in use or in quarantine.

        Raises:
            ConfigError: there is no receiver of that name.
        """
        self._replicas.remove(name)

    # ---- one sync

    async def _update(self, version: int) -> WeightSyncReport:
        if not self._replicas.in_use:
            raise WeightSyncError(
                f"Version {version} can't be sent: there is no receiver. Add one."
                f"{format_failures(self._replicas.quarantined.values())}"
            )
        start = time.monotonic()
        sync = SyncRound(
            self._sender,
            self._replicas.in_use,
            version,
            self._config.timeout_s,
            self._receive_strategy,
            followers=self._followers,
            local_senders=self._local_senders,
            stopped=self.generation.stopped,
        )
        try:
            async with report_progress(self._progress, version, lambda: sync.phase):
                await sync.run()
        finally:
            self._replicas.quarantine(sync.not_resumed)
        self._replicas.quarantine(sync.failed)
        lag, self._committed = version - (self.version or 0), sync.manifest
        return self._report(sync, time.monotonic() - start, lag)

    def _report(self, sync: SyncRound, seconds: float, lag: int) -> WeightSyncReport:
        assert sync.manifest is not None, "a successful sync has a manifest"
        version, num_bytes = sync.manifest.version, sync.manifest.tensor_nbytes
        measured = {
            **sync.metrics,
            "lag": float(lag),
            "seconds": seconds,
            "gib_per_second": num_bytes / _GIB / seconds,
            "quarantined": float(len(self._replicas.quarantined)),
            "rejoined": float(self._replicas.rejoined),
        }
        self._metrics = {f"weight_sync/{name}": value for name, value in measured.items()}
        return WeightSyncReport(version=version, num_bytes=num_bytes, seconds=seconds, receivers=sync.active)

    # ---- checks

    def _checked(self, version: int) -> int:
        """The version as an int; numpy has other integers."""
        try:
            number = operator.index(version)
        except TypeError:
            raise WeightSyncError(f"A version must be an integer; got {version!r}.") from None
        if number < 0 or (self._committed is not None and number <= self._committed.version):
            raise WeightSyncError(
                f"Version {number} can't be synchronized: versions start at 0 and must increase; the last one was {self.version}."
            )
        return number

    def _disabled_report(self, version: int) -> WeightSyncReport:
        if not self._said_disabled:
            self._said_disabled = True
            _log.warning(
                "Weight synchronization is disabled (CheckpointEngineConfig.enabled is false): rollout keeps its initial weights."
            )
        return WeightSyncReport(version=version, num_bytes=0, seconds=0.0, receivers=())
