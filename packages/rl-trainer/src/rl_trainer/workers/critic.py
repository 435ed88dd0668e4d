"""The worker of the value function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import msgspec

from rl_protocol import BatchData
from rl_protocol.bridge import tqbridge
from rl_protocol.ports import CriticBackend, DataPlane
from rl_trainer.checkpoints.resumable import Write
from rl_trainer.workers.columns import MASK_AS, TRAINER_SCHEMA, StepColumns
from rl_trainer.workers.messages import StageCall, StageResult
from rl_trainer.workers.model import ModelWorker, UpdateMeter, ranked, resumable
from rl_trainer.workers.stateful import StatefulWorker


@runtime_checkable
class DistributedCritic(CriticBackend, Protocol):
    """A value function that several processes train together."""

    def update_local(self, batch: BatchData, mini_batches: Sequence[Sequence[int]]) -> dict[str, float]:
        """Like DistributedPolicy.update_local."""
        ...


class CriticWorker(ModelWorker, StatefulWorker):
    """The value function under training; see ModelWorker."""

    handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {
        "values": StageCall,
        "update_critic": StageCall,
        **ModelWorker.model_handlers,
        **StatefulWorker.state_handlers,
    }

    def __init__(
        self, plane: DataPlane, columns: StepColumns, backend: CriticBackend, meter: UpdateMeter | None = None
    ) -> None:
        super().__init__(plane, columns, backend, meter)
        self._backend = backend

    @tqbridge(reads=lambda step: step.tokens, writes=("values",), schema=TRAINER_SCHEMA)
    async def values(self, data: BatchData, _: StageCall) -> BatchData:
        """Write `values` under the critic before its update."""
        return self._backend.compute_values(data)

    @tqbridge(reads=lambda step: (*step.tokens, *step.mask, "values", "returns"), reads_as=MASK_AS)
    async def update_critic(self, data: BatchData, call: StageCall) -> StageResult:
        """Update the value function on the batch."""
        if call.mini_batches is None:
            return self._metered(partial(self._backend.update, data), data)
        update = ranked(DistributedCritic, self._backend).update_local
        return self._metered(partial(update, data, call.mini_batches), data)

    def copy_state(self, part: str) -> Mapping[str, Write]:
        return {part: resumable(self._backend).snapshot()}

    def take_state(self, folder: Path) -> None:
        resumable(self._backend).restore(folder)
