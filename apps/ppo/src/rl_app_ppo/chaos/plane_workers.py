"""The worker processes of a run with the stand-in for the model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from rl_app_ppo.chaos.events import Event, EventLog
from rl_app_ppo.chaos.stand_in import ActorState, PlaneRun, respond, update
from rl_app_ppo.config.placement import Role
from rl_app_ppo.worker.call_socket import CallServer, Connection
from rl_protocol import BatchData, KVBatchMeta, RLError, Tag, WorkerDiedError, WorkerError, dense, errors, ragged
from rl_protocol.ports import DataPlane, SessionResult, settle
from rl_protocol.rl_columns import prompt_partition
from rl_protocol.support.host.process_watch import open_process
from rl_trainer.checkpoints.resumable import Write
from rl_trainer.workers.base import Worker
from rl_trainer.workers.columns import ROW_TAG
from rl_trainer.workers.messages import (
    CopyRowsCall,
    PutRowsCall,
    ReadAheadCall,
    RewardResult,
    RolloutCall,
    RolloutResult,
    StageCall,
    StageResult,
)
from rl_trainer.workers.saved_rows import RowFiles
from rl_trainer.workers.stateful import StatefulWorker
from rl_transferqueue import PlaneDescriptor, connect

_GENERATE_S = 0.002
"""Seconds that the responses to a prompt take."""
_STATE = "state.json"


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of the stand-in; also the message that asks for them."""

    weights: str = ""
    version: int = 0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a call returned, or how it failed."""

    payload: bytes = b""
    error: str = ""
    """Name of a class of rl_protocol.errors; empty: it did not fail."""
    message: str = ""


class RolloutStandIn(Worker):
    """Generates responses with `stand_in.respond`."""

    handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {"rollout": RolloutCall, "load": Weights}

    def __init__(self, plane: DataPlane, events: EventLog, name: str) -> None:
        self._plane, self._events, self._name = plane, events, name
        self._weights = Weights()

    async def load(self, call: Weights) -> StageResult:
        """Take new weights."""
        self._weights = call
        return StageResult()

    async def rollout(self, call: RolloutCall) -> RolloutResult:
        """Run and settle the sessions.

        Raises:
            WorkerError: the lease is of other weights than these.
        """
        leases, now = [prompt.lease for prompt in call.prompts], self._weights
        uids = tuple(lease.uid for lease in leases)
        if any(lease.version != now.version for lease in leases):
            raise WorkerError(f"{self._name} has weights of version {now.version}; got leases {leases}.")
        self._events.write(Event(kind="rollout", name=self._name, number=now.version, uids=uids))
        await asyncio.sleep(_GENERATE_S)
        sessions = [(prompt, session) for prompt in call.prompts for session in prompt.lease.sessions]
        ended = [SessionResult(prompt.lease, session, rows=1) for prompt, session in sessions]
        responses = [respond(now.weights, prompt.row, session % call.partition.n) for prompt, session in sessions]
        prompts = BatchData({"prompts": ragged([[prompt.row] for prompt in call.prompts], "int64")})
        rows: list[Tag] = [{ROW_TAG: prompt.row} for prompt in call.prompts]
        await self._plane.put(prompt_partition(call.partition.name), list(uids), prompts, tags=rows)
        tags: list[Tag] = [
            {"prompt_len": 1, "response_len": len(tokens), "version": now.version} for tokens in responses
        ]
        await settle(self._plane, ended, BatchData({"responses": ragged(responses, "int64")}), tags=tags)
        self._events.write(Event(kind="acknowledged", name=self._name, number=now.version, uids=uids))
        return RolloutResult(tokens=sum(map(len, responses)), single=True)


class RewardStandIn(StatefulWorker):
    """Scores responses by their length, and keeps the rows of sampled batches."""

    handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {
        "reward": StageCall,
        "score_ahead": StageCall,
        "adv": StageCall,
        "copy_rows": CopyRowsCall,
        "put_rows": PutRowsCall,
        **StatefulWorker.state_handlers,
    }

    def __init__(self, plane: DataPlane, events: EventLog) -> None:
        self._plane, self._events, self._files = plane, events, RowFiles(plane)

    async def reward(self, rows: KVBatchMeta, call: StageCall) -> RewardResult:
        """Put a score for each row."""
        lengths = np.diff((await self._plane.get(rows, ["responses"])).ragged("responses").offsets)
        scores = BatchData({"scores": dense(lengths.astype(np.float32))})
        await self._plane.put(rows.partition, rows.keys, scores)
        self._events.write(Event(kind="scored", name="reward", number=call.step))
        return RewardResult()

    async def score_ahead(self, rows: KVBatchMeta, call: StageCall) -> StageResult:
        """Score nothing ahead."""
        del rows, call
        return StageResult()

    async def adv(self, rows: KVBatchMeta, call: StageCall) -> StageResult:
        """Read the scores."""
        del call
        await self._plane.get(rows, ["scores"])
        return StageResult()

    async def copy_rows(self, call: CopyRowsCall) -> StageResult:
        """Copy rows for a checkpoint."""
        return await self._files.copy(call)

    async def put_rows(self, call: PutRowsCall) -> StageResult:
        """Put rows of a checkpoint back."""
        return await self._files.put(call)

    def copy_state(self, part: str) -> Mapping[str, Write]:
        """The copied rows."""
        del part
        return self._files.take_writes()

    def take_state(self, folder: Path) -> None:
        """There is none."""


class ActorStandIn(StatefulWorker):
    """Trains with `stand_in.update`."""

    handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {
        "old_log_prob": StageCall,
        "read_ahead": ReadAheadCall,
        "update_actor": StageCall,
        "weights": Weights,
        **StatefulWorker.state_handlers,
    }

    def __init__(self, plane: DataPlane, events: EventLog) -> None:
        self._plane, self._events = plane, events
        self._state = ActorState()

    async def old_log_prob(self, rows: KVBatchMeta, call: StageCall) -> StageResult:
        """Compute nothing."""
        del rows, call
        return StageResult()

    async def read_ahead(self, call: ReadAheadCall) -> StageResult:
        """Read nothing ahead."""
        del call
        return StageResult()

    async def update_actor(self, rows: KVBatchMeta, call: StageCall) -> StageResult:
        """Train a step.

        Raises:
            WorkerError: the driver counts other updates than the weights had.
        """
        if call.updates != self._state.version:
            raise WorkerError(f"The trainer has version {self._state.version}; the driver says {call.updates}.")
        responses = (await self._plane.get(rows, ["responses"])).ragged("responses")
        bounds = zip(responses.offsets[:-1], responses.offsets[1:], strict=True)
        self._state = update(self._state, [responses.values[start:end].tolist() for start, end in bounds])
        self._events.write(Event(kind="trained", name="trainer", number=call.step))
        return StageResult()

    async def weights(self, call: Weights) -> Weights:
        """The newest weights."""
        del call
        return Weights(weights=self._state.weights, version=self._state.version)

    def copy_state(self, part: str) -> Mapping[str, Write]:
        """Copy the state."""
        copied = msgspec.json.encode(self._state)

        def write(folder: Path) -> Sequence[Path]:
            (folder / _STATE).write_bytes(copied)
            return [folder / _STATE]

        return {part: write}

    def take_state(self, folder: Path) -> None:
        """Restore the state."""
        self._state = read_state(folder)


def read_state(folder: Path) -> ActorState:
    """The state of the trainer that a checkpoint has in its folder `actor`."""
    return msgspec.json.decode((folder / _STATE).read_bytes(), type=ActorState)


def role_of(name: str) -> Role:
    """The role of the worker process with this name."""
    kind = name.partition("-")[0]
    return "actor" if kind == "trainer" else "reward" if kind == "reward" else "rollout"


def serve(run: PlaneRun, name: str, socket: Path) -> None:
    """Be a worker process until its parent ends."""
    os.setsid()
    asyncio.run(_serve(run, name, socket))


async def _serve(run: PlaneRun, name: str, socket: Path) -> None:
    ended, parent = asyncio.Event(), open_process(os.getppid())
    asyncio.get_running_loop().add_reader(parent, ended.set)
    events = EventLog(run.events_file)
    events.write(Event(kind="process", name=name, number=os.getpid()))
    workers: dict[str, Worker] = {}

    async def call(role: Role, method: str, payload: bytes) -> bytes:
        if method == "connect":
            plane = await connect(PlaneDescriptor.from_json(payload))
            workers[role] = _KINDS[role](plane, events, name)
            return msgspec.msgpack.encode(Outcome())
        try:
            outcome = Outcome(payload=await workers[role].handle(method, payload))
        except RLError as error:
            outcome = Outcome(error=type(error).__name__, message=str(error))
        return msgspec.msgpack.encode(outcome)

    async with await CallServer(call).listen(socket):
        await ended.wait()


_KINDS: Mapping[Role, Callable[[DataPlane, EventLog, str], Worker]] = {
    "actor": lambda plane, events, _: ActorStandIn(plane, events),
    "reward": lambda plane, events, _: RewardStandIn(plane, events),
    "rollout": RolloutStandIn,
}


class Handle:
    """The driver's handle of a worker process (`rl_trainer.WorkerHandle`)."""

    def __init__(self, name: str, connection: Connection) -> None:
        self.name = name
        self.process: object = self
        self.bytes_moved = 0
        self._connection = connection
        self._role: Role = role_of(name)

    async def call(self, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Run a handler of the worker; see the port."""
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._connection.call(self._role, method, payload)
        except TimeoutError:
            raise WorkerError(f"{self.name} did not answer {method!r} within {timeout_s:g} s.") from None
        except ConnectionError:
            raise WorkerDiedError(f"{self.name} ended during {method!r}.") from None
        if answer.payload is None:
            raise WorkerError(f"{self.name} failed in {method!r}; its traceback is in the log of the run.")
        outcome = msgspec.msgpack.decode(answer.payload, type=Outcome)
        if outcome.error:
            kind: Any = getattr(errors, outcome.error)
            raise kind(f"{self.name}, {method!r}: {outcome.message}")
        return outcome.payload
