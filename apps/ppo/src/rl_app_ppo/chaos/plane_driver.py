"""The driver process of a run with the stand-in: `python -m rl_app_ppo.chaos.plane_driver RUN`.

RUN is a `PlaneRun` as JSON. Data plane, journal, replay buffers, trainer and checkpoints are those
of a training run; only the workers are stand-ins.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from rl_app_ppo.chaos.events import Event, EventLog
from rl_app_ppo.chaos.plane_workers import Handle, Weights, role_of, serve
from rl_app_ppo.chaos.stand_in import PROMPTS, PlaneRun
from rl_app_ppo.worker.call_socket import Connection
from rl_protocol import DataLostError, RLError, WorkerDiedError
from rl_protocol.ports import ReplayBuffer as ReplayBufferPort
from rl_protocol.ports import WeightSyncReport
from rl_protocol.support.fault_points import lease_clock
from rl_protocol.support.temporary_folders import temporary_folder
from rl_trainer import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    Hook,
    LoopConfig,
    PPOTrainer,
    PromptOrder,
    RolloutConfig,
    TrainerParts,
    Workers,
    build_graph,
)
from rl_trainer.checkpoints.checkpoint_folder import newest_whole
from rl_trainer.config import AsyncConfig
from rl_trainer.driver.checkpoint_writer import CheckpointWriter
from rl_trainer.driver.trainer_parts import KeepRows
from rl_trainer.workers.columns import PARTITIONS
from rl_trainer.workers.messages import RolloutCall
from rl_transferqueue import Client, LocalPlane, TransferQueueConfig, connect, start_local_plane
from rl_transferqueue.consume import prompt_groups
from rl_transferqueue.consume.replay_buffer import ReplayBuffer
from rl_transferqueue.journal.disk_journal import check_journal, remove_journal

_CALL_S = 30.0
"""Longest time of a call of a worker."""
_LOCK_S = 30.0
"""Seconds in which the data plane of a killed driver gives its journal up."""
_POLL_S = 0.01
_JUMP_S = 1e3
"""A step of a clock that no run takes."""


def main(arguments: Sequence[str]) -> int:
    """Run to the end; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run = msgspec.json.decode(arguments[0], type=PlaneRun)
    events = EventLog(run.events_file)
    events.write(Event(kind="process", name="driver", number=os.getpid()))
    names = [*(f"rollout-{i}" for i in range(run.rollouts)), "reward", "trainer"]
    with temporary_folder("rl-chaos-sockets-") as sockets:
        fork = multiprocessing.get_context("fork")
        processes = {name: fork.Process(target=serve, args=(run, name, Path(sockets, name))) for name in names}
        for process in processes.values():
            process.start()
        try:
            asyncio.run(_run(run, events, {name: Path(sockets, name) for name in names}))
        except RLError as error:
            logging.getLogger(__name__).error("the run failed: %s", error)
            return 1
        finally:
            for process in processes.values():
                process.kill()
                process.join()
    return 0


async def _run(run: PlaneRun, events: EventLog, sockets: dict[str, Path]) -> None:
    checkpoint, skipped = newest_whole(run.checkpoints)
    done = checkpoint.manifest.step if checkpoint is not None else 0
    logging.getLogger(__name__).info("starts after step %d; skipped checkpoints: %s", done, skipped)
    settings = TransferQueueConfig(
        capacity_mb=32, segment_mb=1, durability="commit", journal_dir=str(run.journal), verify=True
    )
    check_journal(run.journal, wait_s=_LOCK_S)
    events.write(Event(kind="begin", name="driver", number=done))
    async with AsyncExitStack() as stack:
        local = stack.enter_context(await asyncio.to_thread(start_local_plane, settings))
        _name_servers(local, events)
        if local.recovery is not None and local.recovery.rows_incomplete:
            events.write(Event(kind="dropped", name="driver", number=local.recovery.rows_incomplete))
        plane = await connect(local.descriptor)
        stack.push_async_callback(plane.close)
        handles = {name: await _connect(name, path, local, events, stack) for name, path in sockets.items()}
        trainer = PPOTrainer(await _parts(run, events, plane, handles, stack))
        await trainer.resume(checkpoint)
        await trainer.fit()
        rows = (await plane.stats()).rows
        left = sum(count for name, count in rows.items() if name.startswith(PARTITIONS))
    remove_journal(run.journal)
    events.write(Event(kind="end", name="driver", number=left))


def _name_servers(local: LocalPlane, events: EventLog) -> None:
    controller, *units = local.pids
    for name, pid in [("controller", controller), *((f"storage-{i}", pid) for i, pid in enumerate(units))]:
        events.write(Event(kind="process", name=name, number=pid))


async def _connect(name: str, path: Path, local: LocalPlane, events: EventLog, stack: AsyncExitStack) -> Handle:
    """Connect to a worker process, and have it connect to the data plane.

    Raises:
        WorkerDiedError: it does not listen in time.
    """
    deadline = asyncio.get_running_loop().time() + _CALL_S
    while True:
        try:
            connection = await Connection.connect(path)
            break
        except (FileNotFoundError, ConnectionError) as error:
            if asyncio.get_running_loop().time() > deadline:
                raise WorkerDiedError(f"{name} did not listen within {_CALL_S:g} s: {error}.") from None
        await asyncio.sleep(_POLL_S)
    stack.callback(connection.close)
    handle = Handle(name, connection) if role_of(name) != "rollout" else _RolloutHandle(name, connection, events)
    await handle.call("connect", local.descriptor.to_json().encode(), timeout_s=_CALL_S)
    return handle


async def _parts(
    run: PlaneRun, events: EventLog, plane: Client, handles: dict[str, Handle], stack: AsyncExitStack
) -> TrainerParts:
    settings = prompt_groups.ReplayConfig(
        groups_per_version=run.batch, when_stale="drop", max_staleness=run.max_staleness, on_failure="fail"
    )
    clock = _LeaseClock(events)
    clock.buffers = {name: ReplayBuffer(plane, name, settings, clock=clock) for name in PARTITIONS}
    buffers: dict[str, ReplayBufferPort] = {
        name: await stack.enter_async_context(buffer) for name, buffer in clock.buffers.items()
    }
    rollouts = [handle for name, handle in handles.items() if role_of(name) == "rollout"]
    workers = Workers(rollout=rollouts, reward=handles["reward"], actor=[handles["trainer"]])
    algorithm = AlgorithmConfig(old_log_prob="recompute")
    return TrainerParts(
        graph=build_graph(algorithm, ActorConfig()),
        plane=plane,
        buffers=buffers,
        workers=workers,
        weight_sync=_WeightSync(handles["trainer"], rollouts, events),
        train_order=PromptOrder(PROMPTS, run.batch, 0),
        validation_size=0,
        rollout=RolloutConfig(n=run.n, num_workers=run.rollouts),
        actor=ActorConfig(),
        critic=CriticConfig(),
        loop=LoopConfig(
            total_training_steps=run.steps, save_freq=run.save_freq, deterministic=True, stage_timeout_s=_CALL_S
        ),
        on_step=lambda _step, _metrics: None,
        async_rl=AsyncConfig(max_staleness=run.max_staleness),
        checkpoints=CheckpointWriter(run.checkpoints, config="", keep=2, workers=workers, timeout_s=_CALL_S),
        keep_rows=KeepRows(run="chaos", settings=str(run.max_staleness)),
        hooks={"events": _Saved(events)},
    )


class _Saved(Hook):
    """Notes the checkpoints that were published."""

    def __init__(self, events: EventLog) -> None:
        self._events = events

    def on_checkpoint_end(self, step: int, folder: Path) -> None:
        del folder
        self._events.write(Event(kind="saved", name="driver", number=step))


class _LeaseClock:
    """The clock of the leases; notes the prompts whose leases end because it jumps."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._last = lease_clock()
        self.buffers: dict[str, ReplayBuffer] = {}

    def __call__(self) -> float:
        now = lease_clock()
        if now > self._last + _JUMP_S:
            uids = tuple(uid for buffer in self.buffers.values() for uid in buffer.unsettled())
            self._events.write(Event(kind="failed", name="driver", uids=uids))
        self._last = now
        return now


class _RolloutHandle(Handle):
    """Notes the prompts of calls that the driver gives up."""

    def __init__(self, name: str, connection: Connection, events: EventLog) -> None:
        super().__init__(name, connection)
        self._events = events

    async def call(self, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Run a handler of the worker; see the port."""
        try:
            return await super().call(method, payload, timeout_s=timeout_s)
        except RLError as error:
            if method == "rollout" and not isinstance(error, DataLostError):
                prompts = msgspec.msgpack.decode(payload, type=RolloutCall).prompts
                uids = tuple(prompt.lease.uid for prompt in prompts)
                self._events.write(Event(kind="failed", name=self.name, uids=uids))
            raise


class _WeightSync:
    """Sends the weights of the trainer to all rollout processes."""

    def __init__(self, trainer: Handle, rollouts: Sequence[Handle], events: EventLog) -> None:
        self._trainer, self._rollouts, self._events = trainer, rollouts, events

    async def update_weights(self, version: int) -> WeightSyncReport:
        """Send the newest weights; see the port."""
        payload = await self._trainer.call("weights", msgspec.msgpack.encode(Weights()), timeout_s=_CALL_S)
        found = msgspec.msgpack.decode(payload, type=Weights)
        if found.version != version:
            raise WorkerDiedError(f"The trainer has version {found.version}, not {version}.")
        for rollout in self._rollouts:
            await rollout.call("load", payload, timeout_s=_CALL_S)
        self._events.write(Event(kind="version", name="driver", number=version))
        names = tuple(rollout.name for rollout in self._rollouts)
        return WeightSyncReport(version=version, num_bytes=len(payload), seconds=0.0, receivers=names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
