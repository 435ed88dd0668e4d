"""Rollout workers that are replaced when their process or engine dies, or when they miss a sync."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from rl_app_ppo.driver.restart_policy import RestartLimitError, RestartPolicy
from rl_ckpt_engine import CheckpointEngineManager, ReceiverEndpoint, remote
from rl_protocol import RLError, WeightSyncError, WorkerDiedError
from rl_protocol.errors import user_code
from rl_protocol.ports import Memory, WeightSyncReport
from rl_rollout_vllm import EngineDiedError
from rl_trainer import WorkerHandle

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Restartable(WorkerHandle, Protocol):
    """A worker whose process can be replaced."""

    async def restart(self) -> None:
        """Kill the process if it still runs, and start and build another in its place.

        Raises:
            WorkerError: as WorkerHandle.call.
        """
        ...


class Replica:
    """WorkerHandle of a rollout worker that is replaced when it is lost.

    Before a call a lost replica gets a new process, and the manager sends it the current weights.
    Calls during which the process dies are repeated: their responses are generated again. All of
    them wait for the same new process. A replica that gets none is taken out of the weight sync.

    Args:
        worker: the process.
        manager: the weight manager; None: all processes keep the initial weights.
        policy: counts its new processes, and delays them.
        say: prints a line about a new process.
        obstacle: why a new process would be of no use, as a sentence: that a server of Ray, or a
            process that is never replaced, is lost. Empty: there is no such reason.
    """

    def __init__(
        self,
        worker: Restartable,
        manager: CheckpointEngineManager | None,
        policy: RestartPolicy,
        say: Callable[[str], None],
        obstacle: Callable[[], str] = str,
    ) -> None:
        self._worker = worker
        self._manager = manager
        self._policy = policy
        self._say = say
        self._obstacle = obstacle
        self._died = False
        self._error: RLError | None = None
        """Of its death; None: it lives, or was quarantined by the manager."""
        self._processes = 1
        """Started so far: tells the end of the current process from that of an earlier one."""
        self._replacing = asyncio.Lock()

    @property
    def name(self) -> str:
        return self._worker.name

    @property
    def process(self) -> object:
        return self._worker.process

    @property
    def bytes_moved(self) -> int:
        return self._worker.bytes_moved

    @property
    def lost(self) -> bool:
        """Whether the process died, or the manager has quarantined the replica."""
        return self._died or (self._manager is not None and self.name in self._manager.quarantined)

    async def call(self, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Call the worker; if it is lost, replace it and repeat the call.

        `timeout_s` is for each attempt, without the start of a new process.

        Raises:
            WorkerError: the worker failed or was late.
            WorkerDiedError: it died when a new process is of no use.
            RestartLimitError: it has had as many new processes as the policy allows.
        """
        while True:
            await self.replace_lost()
            called = self._processes
            try:
                answer = await self._worker.call(method, payload, timeout_s=timeout_s)
            except (WorkerDiedError, EngineDiedError, WeightSyncError) as error:
                if called == self._processes:
                    self._lose(error)
            else:
                return answer

    async def replace_lost(self) -> None:
        """If the replica is lost, start a new process and send it the committed version.

        Raises:
            WorkerDiedError: a new process is of no use, because the run can't continue.
            RestartLimitError: it has had as many new processes as the policy allows.
            WorkerError: the process did not start.
        """
        async with self._replacing:
            while self.lost:
                await self._replace()

    async def _replace(self) -> None:
        why = self._why()
        if obstacle := self._obstacle():
            self._retire()
            raise WorkerDiedError(f"Rollout worker {self.name} is lost and gets no new process: {obstacle} {why}")
        try:
            restart = self._policy.next(self.name)
        except RestartLimitError as limit:
            self._retire()
            raise RestartLimitError(
                f"Rollout worker {self.name} is lost and gets no new process: {limit} {why}"
            ) from None
        self._say(f"rollout worker {self.name} is lost and gets a new process ({restart}): {why}")
        await asyncio.sleep(restart.wait_s)
        try:
            await self._worker.restart()
            self._processes += 1
            if self._manager is not None:
                await self._manager.add_receiver(remote(ReceiverEndpoint, self._worker))
        except (WorkerDiedError, EngineDiedError, WeightSyncError) as error:
            self._lose(error)
        else:
            self._died, self._error = False, None

    def _why(self) -> str:
        if self._error is not None:
            return self._error.message
        assert self._manager is not None, "a replica that lives is lost by the manager alone"
        return self._manager.quarantined[self.name]

    def _retire(self) -> None:
        """Send the replica no more weights: it gets no new process."""
        manager = self._manager
        if manager is not None and self.name in (*manager.receivers, *manager.quarantined):
            manager.remove_receiver(self.name)

    def _lose(self, error: WorkerDiedError | EngineDiedError | WeightSyncError) -> None:
        self._died, self._error = True, error
        if self._manager is not None and self.name in self._manager.receivers:
            self._manager.quarantine(self.name, error.message.rstrip("."))
        else:
            _log.warning("%s", error)


class ReplicaSync:
    """WeightSync and RolloutMemory that replace replicas when all of them died.

    Args:
        manager: the weight manager.
        replicas: all rollout replicas that can be replaced.
        whole: all weights are sent in each sync, so replicas can drop them before.
        on_synced: called after a synchronization with its report, and the Unix time of its begin.
    """

    def __init__(
        self,
        manager: CheckpointEngineManager,
        replicas: Sequence[Replica],
        *,
        whole: bool = False,
        on_synced: Callable[[WeightSyncReport, float], None] | None = None,
    ) -> None:
        self._manager = manager
        self._replicas = replicas
        self._whole = whole
        self._on_synced = on_synced

    async def update_weights(self, version: int) -> WeightSyncReport:
        """Send a version to all replicas, and again to their successors if all of them died.

        Raises:
            WeightSyncError: no replica has the version although none was lost, or it failed twice.
            WorkerError: a new process did not start.
            RLError: a manager of the user's raised something else.
        """
        began = time.time()
        report = await self._update(version)
        if self._on_synced is not None:
            self._on_synced(report, began)
        return report

    async def _update(self, version: int) -> WeightSyncReport:
        try:
            return await self._sync(version)
        except WeightSyncError:
            lost = [replica for replica in self._replicas if replica.lost]
            if not lost:
                raise
        for replica in lost:
            await replica.replace_lost()
        return await self._sync(version)

    async def _sync(self, version: int) -> WeightSyncReport:
        manager = type(self._manager)
        if manager is CheckpointEngineManager:
            return await self._manager.update_weights(version)
        with user_code(
            lambda raised: RLError(
                f"The weight manager {manager.__qualname__} failed: {raised}. Repair it, or take it out of "
                "checkpoint_engine.checkpoint_manager_class."
            )
        ):
            return await self._manager.update_weights(version)

    async def sleep(self, *, weights_follow: bool) -> int | None:
        """Free memory of the replicas; see RolloutMemory."""
        generation = self._manager.generation
        if not weights_follow:
            return await self._or_replaced(generation.release_kv_cache())
        return await self._or_replaced(generation.sleep(2 if self._whole else 1))

    async def wake(self, part: Memory) -> None:
        """Restore one part of the memory; see RolloutMemory."""
        generation = self._manager.generation
        await self._or_replaced(generation.resume_kv_cache() if part == "kv_cache" else generation.wake(part))

    async def _or_replaced(self, call: Awaitable[T]) -> T | None:
        """Await a call to all replicas; if it fails on all, replace them: new ones do not sleep."""
        try:
            return await call
        except WeightSyncError as error:
            if not self._replicas:
                raise
            for replica in self._replicas:
                self._manager.quarantine(replica.name, error.message.rstrip("."))
                await replica.replace_lost()
            return None
