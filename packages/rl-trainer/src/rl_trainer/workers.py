"""The workers that hold models: the policy under training, its reference, the value function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

import msgspec

from rl_protocol import BatchData, KVBatchMeta, WorkerError
from rl_protocol.ports import CriticBackend, DataPlane, PolicyBackend
from rl_trainer.checkpoints.stateful import Exportable, Resumable, StatefulWorker, Write
from rl_trainer.messages import ReadAheadCall, SaveCall, StageCall, StageResult
from rl_trainer.stages import Stage, StepGraph
from rl_trainer.worker import Worker, read, store

T = TypeVar("T")
EXPORT = "hf"
"""Folder of a checkpoint with the policy for users."""


@runtime_checkable
class RankedPolicy(PolicyBackend, Protocol):
    """A policy that several processes can train together: each is one rank and is given its own rows."""

    def update_share(
        self, batch: BatchData, mini_batches: Sequence[Sequence[int]], *, temperature: float
    ) -> dict[str, float]:
        """This rank's part of an update; all ranks call it with equally many mini-batches.

        Args:
            batch: the rows this rank needs.
            mini_batches: for each optimizer step, numbers of its rows; none is legal.
            temperature: as in `update`.

        Returns:
            Metrics over all ranks, the same on each.
        """
        ...


@runtime_checkable
class RankedCritic(CriticBackend, Protocol):
    """A value function that several processes can train together."""

    def update_share(self, batch: BatchData, mini_batches: Sequence[Sequence[int]]) -> dict[str, float]:
        """See RankedPolicy.update_share."""
        ...


@runtime_checkable
class WithReference(Protocol):
    """A policy that still knows what it was before training, such as a model with adapters."""

    def compute_reference_log_probs(self, batch: BatchData, *, temperature: float) -> BatchData:
        """As PolicyBackend.compute_log_probs, of that policy."""
        ...


def _ranked(kind: type[T], backend: object) -> T:
    if not isinstance(backend, kind):
        raise WorkerError(
            f"{type(backend).__name__} trains in one process; it was called as one of several ranks. Set the engine's world_size to 1."
        )
    return backend


def _resumable(backend: object) -> Resumable:
    if not isinstance(backend, Resumable):
        raise WorkerError(
            f"{type(backend).__name__} has no snapshot and restore; set trainer.save_freq=0 and trainer.resume_mode=disable."
        )
    return backend


class ModelWorker(Worker):
    """A worker whose stages may be read ahead: every rank has its rows before any rank computes."""

    model_handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {"read_ahead": ReadAheadCall}

    def __init__(self, plane: DataPlane, graph: StepGraph) -> None:
        self._plane = plane
        self._graph = graph
        self._ahead: tuple[ReadAheadCall, BatchData] | None = None

    async def read_ahead(self, call: ReadAheadCall) -> StageResult:
        """Read what the stage needs of these rows, and keep it for the call of the stage that follows.

        Raises:
            MissingDataError: see DataPlane.get.
        """
        self._ahead = None
        self._ahead = call, await read(self._plane, call.batch, self._graph[call.stage])
        return StageResult()

    async def _read(self, stage: Stage, batch: KVBatchMeta) -> BatchData:
        """The columns the stage reads, unless they were read ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == ReadAheadCall(stage=stage.name, batch=batch):
            return ahead[1]
        return await read(self._plane, batch, stage)


class ActorWorker(ModelWorker, StatefulWorker):
    """The policy under training; with adapters also the reference."""

    handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {
        "old_log_prob": StageCall,
        "ref": StageCall,
        "update_actor": StageCall,
        "save": SaveCall,
        **ModelWorker.model_handlers,
        **StatefulWorker.state_handlers,
    }

    def __init__(self, plane: DataPlane, graph: StepGraph, backend: PolicyBackend, temperature: float) -> None:
        super().__init__(plane, graph)
        self._backend = backend
        self._temperature = temperature

    async def old_log_prob(self, call: StageCall) -> StageResult:
        """Write `old_log_probs` and `entropy` under the policy before its update, and what else the backend gives and the stage declares."""
        stage = self._graph["old_log_prob"]
        data = await self._read(stage, call.batch)
        out = self._backend.compute_log_probs(data, temperature=self._temperature)
        columns = BatchData({"old_log_probs": out["log_probs"], **out.columns})
        if call.writes:
            await store(self._plane, call.batch, stage, data, columns)
        return StageResult()

    async def update_actor(self, call: StageCall) -> StageResult:
        """Optimise the policy over the batch."""
        data = await self._read(self._graph["update_actor"], call.batch)
        if call.mini_batches is None:
            return StageResult(metrics=self._backend.update(data, temperature=self._temperature))
        backend = _ranked(RankedPolicy, self._backend)
        return StageResult(metrics=backend.update_share(data, call.mini_batches, temperature=self._temperature))

    async def ref(self, call: StageCall) -> StageResult:
        """Write `ref_log_prob`: this policy without its adapters."""
        stage = self._graph["ref"]
        data = await self._read(stage, call.batch)
        if not isinstance(self._backend, WithReference):
            raise WorkerError(
                f"{type(self._backend).__name__} has no reference policy in it; start a reference worker."
            )
        out = self._backend.compute_reference_log_probs(data, temperature=self._temperature)
        if call.writes:
            await store(self._plane, call.batch, stage, data, BatchData({"ref_log_prob": out["log_probs"]}))
        return StageResult()

    async def save(self, call: SaveCall) -> StageResult:
        """Write the Hugging Face checkpoint."""
        self._backend.save_pretrained(Path(call.path))
        return StageResult()

    def copy_state(self, part: str) -> Mapping[str, Write]:
        """See StatefulWorker.copy_state: the state, and the policy for users."""
        writes = {part: _resumable(self._backend).snapshot()}
        return writes | ({EXPORT: self._backend.export()} if isinstance(self._backend, Exportable) else {})

    def take_state(self, folder: Path) -> None:
        """See StatefulWorker.take_state."""
        _resumable(self._backend).restore(folder)


class ReferenceWorker(ModelWorker):
    """The frozen policy that the divergence is measured from."""

    handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {"ref": StageCall, **ModelWorker.model_handlers}

    def __init__(self, plane: DataPlane, graph: StepGraph, backend: PolicyBackend, temperature: float) -> None:
        super().__init__(plane, graph)
        self._backend = backend
        self._temperature = temperature

    async def ref(self, call: StageCall) -> StageResult:
        """Write `ref_log_prob`."""
        stage = self._graph["ref"]
        data = await self._read(stage, call.batch)
        out = self._backend.compute_log_probs(data, temperature=self._temperature)
        if call.writes:
            await store(self._plane, call.batch, stage, data, BatchData({"ref_log_prob": out["log_probs"]}))
        return StageResult()


class CriticWorker(ModelWorker, StatefulWorker):
    """The value function under training."""

    handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {
        "values": StageCall,
        "update_critic": StageCall,
        **ModelWorker.model_handlers,
        **StatefulWorker.state_handlers,
    }

    def __init__(self, plane: DataPlane, graph: StepGraph, backend: CriticBackend) -> None:
        super().__init__(plane, graph)
        self._backend = backend

    async def values(self, call: StageCall) -> StageResult:
        """Write `values` under the critic before its update."""
        stage = self._graph["values"]
        data = await self._read(stage, call.batch)
        out = self._backend.compute_values(data)
        if call.writes:
            await store(self._plane, call.batch, stage, data, out)
        return StageResult()

    async def update_critic(self, call: StageCall) -> StageResult:
        """Optimise the value function over the batch."""
        data = await self._read(self._graph["update_critic"], call.batch)
        if call.mini_batches is None:
            return StageResult(metrics=self._backend.update(data))
        return StageResult(metrics=_ranked(RankedCritic, self._backend).update_share(data, call.mini_batches))

    def copy_state(self, part: str) -> Mapping[str, Write]:
        """See StatefulWorker.copy_state."""
        return {part: _resumable(self._backend).snapshot()}

    def take_state(self, folder: Path) -> None:
        """See StatefulWorker.take_state."""
        _resumable(self._backend).restore(folder)
