"""Rollout workers that are replaced when they are lost: their process or that of their engine died, or a synchronisation left them behind."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from rl_app_ppo.wiring.weights import RemoteReceiver
from rl_ckpt_engine import CheckpointEngineManager
from rl_protocol import WeightSyncError, WorkerDiedError
from rl_protocol.ports import WeightSyncReport
from rl_rollout_vllm import EngineDiedError
from rl_trainer import WorkerHandle

_log = logging.getLogger(__name__)
RESTARTS = 3
"""New processes that one replica gets in a row; a call that succeeds ends the row."""


class Restartable(WorkerHandle, Protocol):
    """A worker whose process can be replaced."""

    async def restart(self) -> None:
        """End the process, should it still live, and start another, built as it was.

        Raises:
            WorkerError: as WorkerHandle.call.
        """
        ...


class Replica:
    """WorkerHandle of a rollout worker that is replaced when it is lost.

    A call first makes sure that the replica is there: a new process starts in the place of one that is lost, and the manager brings it to the
    version that the others have. A call during which the process dies is made again: what had been generated and not handed over is
    generated anew.

    Args:
        worker: the process.
        manager: of the weights; None: rollout keeps the initial ones, which each process loads itself.
    """

    def __init__(self, worker: Restartable, manager: CheckpointEngineManager | None) -> None:
        self._worker = worker
        self._manager = manager
        self._died = False
        self._restarts = 0

    @property
    def name(self) -> str:
        """See WorkerHandle."""
        return self._worker.name

    @property
    def bytes_moved(self) -> int:
        """See WorkerHandle."""
        return self._worker.bytes_moved

    @property
    def lost(self) -> bool:
        """Whether a process died, or the manager keeps the replica out."""
        return self._died or (self._manager is not None and self.name in self._manager.quarantined)

    async def call(self, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        """See WorkerHandle.call; `timeout_s` is for each process that is called, without the time that it takes to start.

        Raises:
            WorkerError: the worker failed or was late, or died once more after RESTARTS new processes in a row.
            EngineDiedError: likewise, of the engine below it.
            WeightSyncError: the last of these could not be brought to the version of the others.
        """
        while True:
            try:
                await self.replace_lost()
                answer = await self._worker.call(method, payload, timeout_s=timeout_s)
            except (WorkerDiedError, EngineDiedError, WeightSyncError) as error:
                if self._restarts == RESTARTS:
                    raise
                self._lose(error)
            else:
                self._restarts = 0
                return answer

    async def replace_lost(self) -> None:
        """Nothing, unless the replica is lost: then start a process in its place and bring it to the committed version.

        Raises:
            WorkerError: it did not start.
            WeightSyncError: it could not catch up.
        """
        if not self.lost:
            return
        self._restarts += 1
        _log.warning("Rollout worker %s gets a new process, %d of %d in a row.", self.name, self._restarts, RESTARTS)
        await self._worker.restart()
        if self._manager is not None:
            await self._manager.add_receiver(RemoteReceiver(self._worker))
        self._died = False

    def _lose(self, error: WorkerDiedError | EngineDiedError | WeightSyncError) -> None:
        self._died = True
        if self._manager is not None:
            self._manager.quarantine(self.name, error.message.rstrip("."))
        else:
            _log.warning("%s", error)


class ReplicaSync:
    """WeightSync over the manager: a version that reached nobody because the replicas died goes to those that take their place.

    Args:
        manager: of the weights.
        replicas: all of them.
    """

    def __init__(self, manager: CheckpointEngineManager, replicas: Sequence[Replica]) -> None:
        self._manager = manager
        self._replicas = replicas

    async def update_weights(self, version: int) -> WeightSyncReport:
        """See WeightSync.

        Raises:
            WeightSyncError: nobody has the version, and nobody was lost, or it happened twice.
            WorkerError: a new process did not start.
        """
        try:
            return await self._manager.update_weights(version)
        except WeightSyncError:
            lost = [replica for replica in self._replicas if replica.lost]
            if not lost:
                raise
        for replica in lost:
            await replica.replace_lost()
        return await self._manager.update_weights(version)
