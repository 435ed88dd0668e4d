"""The workers of the policy under training and of its reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import msgspec
import numpy as np

from rl_protocol import BatchData, WorkerError
from rl_protocol.bridge import declaration, tqbridge
from rl_protocol.ports import DataPlane, PolicyBackend
from rl_protocol.rl_columns import TEACHER_PROMPTS
from rl_trainer.algorithms.old_log_prob import INTERPOLATION, LogProbGap, interpolation
from rl_trainer.checkpoints.resumable import Exportable, Write
from rl_trainer.workers.columns import MASK_AS, TRAINER_SCHEMA, StepColumns
from rl_trainer.workers.messages import SaveCall, StageCall, StageResult
from rl_trainer.workers.model import ModelWorker, UpdateMeter, ranked, resumable
from rl_trainer.workers.stateful import StatefulWorker

_reference = tqbridge(
    reads=lambda step: step.reference_tokens,
    reads_as={TEACHER_PROMPTS: "prompts"},
    writes=lambda step: ("ref_log_prob", *step.reference_top),
    schema=TRAINER_SCHEMA,
)
"""The columns of the stage `ref`, in whichever worker."""
EXPORT = "hf"
"""Folder of a checkpoint that holds the policy for users."""


@runtime_checkable
class DistributedPolicy(PolicyBackend, Protocol):
    """A policy that several processes train together: each is one rank and gets its own rows."""

    def update_local(
        self, batch: BatchData, mini_batches: Sequence[Sequence[int]], *, temperature: float
    ) -> dict[str, float]:
        """Run this rank's part of an update; all ranks call it with equally many mini-batches.

        Args:
            batch: the rows of this rank.
            mini_batches: row numbers for each optimizer step; an empty step is legal.
            temperature: as in `update`.

        Returns:
            Metrics over all ranks, the same on each.
        """
        ...


@runtime_checkable
class WithReference(Protocol):
    """A policy that can compute its initial log-probs, such as a model with adapters."""

    def compute_reference_log_probs(self, batch: BatchData, *, temperature: float) -> BatchData:
        """Like PolicyBackend.compute_log_probs, for the initial policy."""
        ...


@runtime_checkable
class TeachesItself(Protocol):
    """A policy under training that finds the most probable tokens, as the teacher of itself."""

    def compute_teacher_log_probs(self, batch: BatchData, *, temperature: float) -> BatchData:
        """Like PolicyBackend.compute_log_probs, with the most probable tokens."""
        ...


class ActorWorker(ModelWorker, StatefulWorker):
    """The policy under training; with adapters, also the reference.

    Args:
        plane: see ModelWorker.
        columns: see ModelWorker.
        backend: the policy.
        temperature: of the log-probs.
        teacher_is_policy: whether the stage `ref` computes with the policy as it is.
        meter: see ModelWorker.
    """

    handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {
        "log_prob_gap": StageCall,
        "old_log_prob": StageCall,
        "ref": StageCall,
        "update_actor": StageCall,
        "save": SaveCall,
        **ModelWorker.model_handlers,
        **StatefulWorker.state_handlers,
    }

    def __init__(
        self,
        plane: DataPlane,
        columns: StepColumns,
        backend: PolicyBackend,
        temperature: float,
        *,
        teacher_is_policy: bool = False,
        meter: UpdateMeter | None = None,
    ) -> None:
        super().__init__(plane, columns, backend, meter)
        self._backend = backend
        self._temperature = temperature
        self._teacher_is_policy = teacher_is_policy

    @tqbridge(reads=lambda step: (*step.sampled_tokens, "response_mask", "rollout_log_probs"))
    async def log_prob_gap(self, data: BatchData, _: StageCall) -> LogProbGap:
        """Compare log-probs of the policy before its update with those of the rollout engine."""
        out = self._backend.compute_log_probs(data, temperature=self._temperature)
        rollout, mask = data.ragged("rollout_log_probs"), data.ragged("response_mask").values.astype(np.bool_)
        return LogProbGap.of(rollout.values, out.ragged("log_probs").values, mask, rollout.offsets)

    @tqbridge(
        reads=lambda step: step.sampled_tokens,
        writes=lambda step: ("old_log_probs", "entropy", *step.sum_pi_squared, *step.recorded),
        schema=TRAINER_SCHEMA,
    )
    async def old_log_prob(self, data: BatchData, _: StageCall) -> BatchData:
        """Write `old_log_probs` and `entropy` of the policy before its update.

        `sum_pi_squared` is written where the advantage estimator reads it, and the experts of each
        token where the update replays them.
        """
        out = self._backend.compute_log_probs(data, temperature=self._temperature)
        made = BatchData({"old_log_probs": out["log_probs"], **out.columns})
        return made.select_fields(declaration(self.old_log_prob, self.columns).writes)

    @tqbridge(
        reads=lambda step: (
            *step.sampled_tokens,
            *step.recorded,
            *step.mask,
            *step.old,
            *step.advantages[:1],
            *step.reference_loss,
            *step.reference_top,
            *step.weights,
            *step.chosen,
            *step.versions,
            *step.part_weights,
        ),
        reads_as=lambda step: {**step.old_as, **MASK_AS},
    )
    async def update_actor(self, data: BatchData, call: StageCall) -> StageResult:
        """Update the policy on the batch.

        Raises:
            BatchError: the old log-probs are interpolated, and a token is of later weights than the
                policy's.
        """
        for name in self.columns.versions:
            data = data.union(BatchData({INTERPOLATION: interpolation(data.ragged(name), call.updates)}))
        if call.mini_batches is None:
            return self._metered(partial(self._backend.update, data, temperature=self._temperature), data)
        update = ranked(DistributedPolicy, self._backend).update_local
        return self._metered(partial(update, data, call.mini_batches, temperature=self._temperature), data)

    @_reference
    async def ref(self, data: BatchData, _: StageCall) -> BatchData:
        """As `ReferenceWorker.ref`, of this policy without its adapters, or as it is."""
        if self._teacher_is_policy:
            policy = self._backend
            compute = (
                policy.compute_teacher_log_probs if isinstance(policy, TeachesItself) else policy.compute_log_probs
            )
            return _of_reference(compute(data, temperature=self._temperature))
        if not isinstance(self._backend, WithReference):
            raise WorkerError(f"{type(self._backend).__name__} contains no reference policy; start a reference worker.")
        return _of_reference(self._backend.compute_reference_log_probs(data, temperature=self._temperature))

    async def save(self, call: SaveCall) -> StageResult:
        """Write the Hugging Face checkpoint."""
        self._backend.save_pretrained(Path(call.path))
        return StageResult()

    def copy_state(self, part: str) -> Mapping[str, Write]:
        writes = {part: resumable(self._backend).snapshot()}
        return writes | ({EXPORT: self._backend.export()} if isinstance(self._backend, Exportable) else {})

    def take_state(self, folder: Path) -> None:
        resumable(self._backend).restore(folder)


class ReferenceWorker(ModelWorker):
    """The frozen policy from which the divergence is measured."""

    handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {"ref": StageCall, **ModelWorker.model_handlers}

    def __init__(self, plane: DataPlane, columns: StepColumns, backend: PolicyBackend, temperature: float) -> None:
        super().__init__(plane, columns, backend)
        self._backend = backend
        self._temperature = temperature

    @_reference
    async def ref(self, data: BatchData, _: StageCall) -> BatchData:
        """Write `ref_log_prob`, and the most probable tokens."""
        return _of_reference(self._backend.compute_log_probs(data, temperature=self._temperature))


def _of_reference(computed: BatchData) -> BatchData:
    """The columns of the stage `ref`, from those of a policy."""
    named = {"log_probs": "ref_log_prob", "top_log_probs": "ref_top_log_probs", "top_tokens": "ref_top_tokens"}
    return BatchData({named[name]: column for name, column in computed.columns.items() if name in named})
