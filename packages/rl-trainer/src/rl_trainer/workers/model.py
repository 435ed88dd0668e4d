"""The base of the workers that hold a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol, TypeVar

import msgspec

from rl_protocol import BatchData, KVBatchMeta, WorkerError
from rl_protocol.bridge import Fetched, ReplicaOfRanks, fetch
from rl_protocol.ports import DataPlane
from rl_trainer.algorithms.arrays import IntArray
from rl_trainer.checkpoints.resumable import Resumable
from rl_trainer.workers.base import Worker, with_prompts
from rl_trainer.workers.columns import StepColumns
from rl_trainer.workers.messages import ReadAheadCall, StageResult, StateDigest, StateDigestCall

T = TypeVar("T")


class UpdateMeter(Protocol):
    """Measures an update."""

    def __call__(self, update: Callable[[], dict[str, float]], lengths: IntArray) -> dict[str, float]:
        """Run an update of rows with these numbers of tokens; returns its metrics and further
        ones."""
        ...


def ranked(kind: type[T], backend: object) -> T:
    if not isinstance(backend, kind):
        raise WorkerError(
            f"{type(backend).__name__} trains in one process; it was called as one of several ranks. Set the engine's world_size to 1."
        )
    return backend


def resumable(backend: object) -> Resumable:
    if not isinstance(backend, Resumable):
        raise WorkerError(
            f"{type(backend).__name__} has no snapshot, restore and state_digest, which PPOTrainer.resume, LoopConfig.save_freq and keep_batches use."
        )
    return backend


class ModelWorker(Worker):
    """A worker whose rows can be read ahead: all ranks have them before any rank computes.

    Args:
        plane: where the rows are.
        columns: the columns of the run.
        backend: the model. Of the ranks of one replica of it, only the first uses the plane.
        meter: measures the updates of the model; None: they are not measured.
    """

    model_handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {
        "read_ahead": ReadAheadCall,
        "state_digest": StateDigestCall,
    }

    def __init__(
        self, plane: DataPlane, columns: StepColumns, backend: object, meter: UpdateMeter | None = None
    ) -> None:
        self.plane = with_prompts(plane)
        self.columns = columns
        self._model = backend
        self._meter = meter
        self.replicas = backend.replicas if isinstance(backend, ReplicaOfRanks) else None
        self._ahead: tuple[str, Fetched] | None = None

    async def read_ahead(self, call: ReadAheadCall) -> StageResult:
        """Read the rows of a stage, and keep them for the call of the stage that follows.

        Raises:
            MissingDataError: see DataPlane.get.
        """
        self._ahead = None
        self._ahead = call.stage, await fetch(self, getattr(self, call.stage), call.batch)
        return StageResult()

    async def state_digest(self, call: StateDigestCall) -> StateDigest:
        """The digest of weights and optimizer state."""
        del call
        return StateDigest(sha256=resumable(self._model).state_digest())

    def _metered(self, update: Callable[[], dict[str, float]], data: BatchData) -> StageResult:
        """The metrics of an update with these rows."""
        if self._meter is None:
            return StageResult(metrics=update())
        return StageResult(
            metrics=self._meter(update, data.ragged("prompts").lengths + data.ragged("responses").lengths)
        )

    def _rows(self, stage: str, batch: KVBatchMeta) -> KVBatchMeta | Fetched:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and (ahead[0], ahead[1].meta) == (stage, batch):
            return ahead[1]
        return batch
