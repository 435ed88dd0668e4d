"""Brings one version of the weights from the trainer to every rollout replica, or says why not."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar, TypeVar

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.engine import CheckpointEngine
from rl_ckpt_engine.groups import mover
from rl_ckpt_engine.handles import CachingHandle, Memory, ReceiverHandle, SenderHandle, SleepingHandle
from rl_ckpt_engine.manifest import Manifest
from rl_ckpt_engine.phases import call_all, call_one, listed
from rl_ckpt_engine.progress import Tell, told
from rl_ckpt_engine.rounds import SyncRound, catch_up
from rl_protocol.errors import ConfigError, WeightSyncError
from rl_protocol.ports import WeightSyncReport

_log = logging.getLogger(__name__)
_GIB = 1 << 30
H = TypeVar("H", bound=ReceiverHandle)


class CheckpointEngineManager:
    """Implements the port WeightSync over one sender and named receivers.

    A sync sends once, lets everybody receive and verify, and activates where that worked; until then replicas generate with what they had. A
    receiver that fails while another succeeds is quarantined: it is told to stop, never called again, and named in `quarantined` until it
    is removed or added anew. When nobody succeeds the fault lies with the version rather than with them: all go on with their old weights
    and `update_weights` raises. Only a receiver that can't even resume is quarantined then.

    Between syncs all replicas can be told to stop generating, and to give memory back to others on their devices. The same rules hold: who
    fails while another succeeds is quarantined, and when nobody succeeds it is an error.

    Args:
        sender: has the newest weights.
        receivers: replicas with distinct names; more may be added later.
        config: `timeout_s` is the deadline of each phase.
        engine: class of the engine; needed when its members form a group.
        progress: told about a sync that takes longer than progress.QUIET_S; ProgressBar() draws it.

    Raises:
        ConfigError: two receivers have one name, or the sender's handle does not fit the engine.
    """

    API_VERSION: ClassVar[int] = 1
    """A manager that a package offers states this in its own body; the registry compares it with ENGINE_API_VERSION."""

    def __init__(
        self,
        sender: SenderHandle,
        receivers: Iterable[ReceiverHandle],
        config: CheckpointEngineConfig | None = None,
        engine: type[CheckpointEngine] | None = None,
        progress: Tell | None = None,
    ) -> None:
        self._progress = progress
        self._sender = sender
        self._mover = mover(engine, sender)
        self._config = CheckpointEngineConfig() if config is None else config
        self._receivers: dict[str, ReceiverHandle] = {}
        for handle in receivers:
            self._check_new(handle.name)
            self._receivers[handle.name] = handle
        self._quarantined: dict[str, str] = {}
        self._rejoined = 0
        self._lock = asyncio.Lock()
        self._syncing: int | None = None
        self._stopped = False
        self._committed: Manifest | None = None
        self._last_report: WeightSyncReport | None = None
        self._metrics: dict[str, float] = {}
        self._said_disabled = False

    @property
    def receivers(self) -> tuple[str, ...]:
        """Names of the receivers in good standing."""
        return tuple(self._receivers)

    @property
    def quarantined(self) -> Mapping[str, str]:
        """Name of each receiver that fell out -> why. Send them no requests."""
        return MappingProxyType(self._quarantined)

    @property
    def version(self) -> int | None:
        """The version that was committed last; None before the first."""
        return None if self._committed is None else self._committed.version

    @property
    def last_report(self) -> WeightSyncReport | None:
        """What the last successful sync did."""
        return self._last_report

    @property
    def metrics(self) -> dict[str, float]:
        """Plain numbers of the last successful sync: bytes of one copy of the model, seconds in all and by phase (a phase ends with its
        slowest receiver), GiB of one copy per second in all, version and by how many versions the replicas were behind it (lag), number of
        receivers, of those in quarantine, and of returns from there since the manager was made."""
        return dict(self._metrics)

    async def update_weights(self, version: int) -> WeightSyncReport:
        """Send, verify and activate `version` on every receiver.

        Raises:
            WeightSyncError: another sync runs, the version does not grow, there is no receiver, the sender failed, or no receiver could
                activate the version; names each and why. Every receiver that can resumes with the weights it had.
        """
        if not self._config.enabled:
            return self._disabled_report(version)
        if self._syncing is not None:
            raise WeightSyncError(
                f"Version {version} can't be synchronised while version {self._syncing} is; await that first."
            )
        self._check_version(version)
        self._syncing = version
        try:
            async with self._lock:
                return await self._update(version)
        finally:
            self._syncing = None

    async def abort_generation(self) -> None:
        """Have every replica end what runs and admit nothing until `resume_generation`; a sync in between changes that as little as a newcomer does.

        Raises:
            WeightSyncError: no replica could.
        """
        self._stopped = True
        await self._everywhere("pause", self._receivers, lambda handle: handle.pause(self._config.timeout_s))

    async def resume_generation(self) -> None:
        """Have every replica admit requests again.

        Raises:
            WeightSyncError: no replica could.
        """
        self._stopped = False
        await self._everywhere("resume", self._receivers, lambda handle: handle.resume(self._config.timeout_s))

    async def sleep(self, level: int = 1) -> None:
        """Have every replica end what runs and give its memory back until `wake`.

        Args:
            level: 1: weights are kept aside, keys and values forgotten; 2: weights are given up as well, and must be sent between
                `wake("weights")` and `wake("kv_cache")`.

        Raises:
            ConfigError: a replica's handle offers no sleep.
            WeightSyncError: no replica could.
        """
        await self._everywhere("sleep", self._sleepers(), lambda handle: handle.sleep(level, self._config.timeout_s))

    async def wake(self, part: Memory | None = None) -> None:
        """Have every replica take one part of its memory again, or all of it; errors as of `sleep`."""
        await self._everywhere("wake", self._sleepers(), lambda handle: handle.wake(part, self._config.timeout_s))

    async def release_kv_cache(self) -> None:
        """Have every replica end what runs and give back the memory of keys and values alone; errors as of `sleep`."""
        await self.sleep(1)
        await self.wake("weights")

    async def resume_kv_cache(self) -> None:
        """Have every replica take room for keys and values again, and admit requests; errors as of `sleep`."""
        await self.wake("kv_cache")

    async def add_receiver(self, handle: ReceiverHandle) -> None:
        """Take in a replica, new or back from quarantine, and bring it to the version committed last. Waits for a sync that runs.

        Raises:
            ConfigError: a receiver in good standing has that name.
            WeightSyncError: it could not catch up; it was not taken in and stays paused.
        """
        async with self._lock:
            self._check_new(handle.name)
            limit, committed = self._config.timeout_s, self._committed if self._config.enabled else None
            if committed is not None:
                await self._catch_up(handle, committed)
            if self._stopped:
                await call_one("pause", handle.name, limit, handle.pause(limit))
            elif committed is not None:
                await call_one("resume", handle.name, limit, handle.resume(limit))
            self._rejoined += self._quarantined.pop(handle.name, None) is not None
            self._receivers[handle.name] = handle

    def quarantine(self, name: str, reason: str) -> None:
        """Take a receiver out of use that was found dead between two syncs; one that is in quarantine stays there for its old reason.

        Raises:
            ConfigError: there is none of that name.
        """
        self._check_known(name)
        self._quarantine({name: reason})

    def remove_receiver(self, name: str) -> None:
        """Forget a replica, in good standing or in quarantine; a sync that runs no longer waits for it to be of use.

        Raises:
            ConfigError: there is none of that name.
        """
        self._check_known(name)
        self._receivers.pop(name, None)
        self._quarantined.pop(name, None)

    # ------------------------------------------------------------------------------------------------------------ one sync

    async def _update(self, version: int) -> WeightSyncReport:
        if not self._receivers:
            raise WeightSyncError(f"Version {version} has no receiver to go to; add one.{listed(self._quarantined)}")
        start = time.monotonic()
        limit = self._config.timeout_s
        sync = SyncRound(self._sender, self._receivers, version, limit, self._mover, stopped=self._stopped)
        try:
            async with told(self._progress, version, lambda: sync.phase):
                await sync.run()
        finally:
            self._quarantine(sync.stuck)
        self._quarantine(sync.failed)
        lag, self._committed = version - (self.version or 0), sync.manifest
        return self._report(sync, time.monotonic() - start, lag)

    def _report(self, sync: SyncRound, seconds: float, lag: int) -> WeightSyncReport:
        assert sync.manifest is not None, "a sync that succeeded has sent something"
        version, num_bytes = sync.manifest.version, sync.manifest.tensor_nbytes
        self._last_report = WeightSyncReport(
            version=version, num_bytes=num_bytes, seconds=seconds, receivers=sync.active
        )
        self._metrics = {
            "weight_sync/version": float(version),
            "weight_sync/lag": float(lag),
            "weight_sync/bytes": float(num_bytes),
            "weight_sync/seconds": seconds,
            "weight_sync/gib_per_second": num_bytes / _GIB / seconds,
            "weight_sync/receivers": float(len(sync.active)),
            "weight_sync/quarantined": float(len(self._quarantined)),
            "weight_sync/rejoined": float(self._rejoined),
            **{f"weight_sync/{phase}_seconds": spent for phase, spent in sync.seconds.items()},
        }
        return self._last_report

    def _quarantine(self, reasons: Mapping[str, str]) -> None:
        for name, reason in reasons.items():
            if self._receivers.pop(name, None) is not None:  # it may have been removed meanwhile
                self._quarantined[name] = reason
                _log.warning("Receiver %s is quarantined: %s.", name, reason)

    def _sleepers(self) -> dict[str, SleepingHandle]:
        sleepers = {name: handle for name, handle in self._receivers.items() if isinstance(handle, SleepingHandle)}
        for name in self._receivers.keys() - sleepers.keys():
            raise ConfigError(
                f"Receiver {name!r} can't sleep or wake: its handle {type(self._receivers[name]).__name__} has no methods sleep and wake."
            )
        return sleepers

    async def _everywhere(self, what: str, handles: Mapping[str, H], call: Callable[[H], Awaitable[None]]) -> None:
        """The same call of every replica, not during a sync."""
        async with self._lock:
            outcome = await call_all(what, handles, self._config.timeout_s, call)
            if outcome.failed and not outcome.done:
                raise WeightSyncError(f"No replica did what it was asked to.{listed(outcome.failed)}")
            self._quarantine(outcome.failed)

    async def _catch_up(self, handle: ReceiverHandle, committed: Manifest) -> None:
        """From the sender, or else from whoever keeps the version for others."""
        name, version, reasons = handle.name, committed.version, dict[str, str]()
        async for manifest in self._offers(committed, reasons):
            try:
                await catch_up(handle, manifest, self._config.timeout_s, self._mover)
                return
            except WeightSyncError as error:
                reasons[str(len(reasons))] = str(error)
        raise WeightSyncError(
            f"Receiver {name!r} could not catch up with version {version} and stays out, paused.{listed(reasons)} If the sender has gone on, a "
            "new sync is needed: call update_weights with a later version, then add it again.",
            peer=name,
        )

    async def _offers(self, committed: Manifest, reasons: dict[str, str]) -> AsyncGenerator[Manifest]:
        """Manifests of the version committed last: as it was sent, then as it is kept by sender and receivers."""
        yield committed
        for handle in (self._sender, *self._receivers.values()):
            if isinstance(handle, CachingHandle):
                try:
                    kept = await call_one(
                        "republish",
                        getattr(handle, "name", "the sender"),
                        self._config.timeout_s,
                        handle.republish(self._config.timeout_s),
                    )
                    manifest = Manifest.decode(kept)
                except WeightSyncError as error:
                    reasons[str(len(reasons))] = str(error)
                    continue
                if manifest.same_weights(committed):
                    yield manifest

    # ------------------------------------------------------------------------------------------------------------ checks

    def _check_new(self, name: str) -> None:
        if name in self._receivers:
            raise ConfigError(f"Two receivers are called {name!r}; names must be unique.")

    def _check_known(self, name: str) -> None:
        known = {*self._receivers, *self._quarantined}
        if name not in known:
            raise ConfigError(f"There is no receiver {name!r}; there are {sorted(known)}.")

    def _check_version(self, version: int) -> None:
        if version < 0 or (self._committed is not None and version <= self._committed.version):
            raise WeightSyncError(
                f"Version {version} can't be synchronised: versions start at 0 and must grow; the last one was {self.version}."
            )

    def _disabled_report(self, version: int) -> WeightSyncReport:
        if not self._said_disabled:
            self._said_disabled = True
            _log.warning(
                "Weight synchronisation is off (checkpoint_engine.enabled): rollout keeps its initial weights."
            )
        return WeightSyncReport(version=version, num_bytes=0, seconds=0.0, receivers=())
