"""Keeps the batch of each step, and trains kept batches again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_protocol import KVBatchMeta, RowKey
from rl_protocol.ports import DataPlane
from rl_protocol.rl_columns import TRAIN_PARTITION, prompt_partition
from rl_trainer.asyncio_tasks import gather_or_cancel
from rl_trainer.checkpoints.checkpoint_folder import Checkpoint, FileFacts, step_name
from rl_trainer.checkpoints.held_batches import SavedRows
from rl_trainer.checkpoints.kept_batches import PROMPTS, ROWS, KeptBatch, publish, unpublished
from rl_trainer.driver.checkpoint_writer import load
from rl_trainer.driver.stage_calls import StepRows, Workers, call
from rl_trainer.driver.stage_runner import Clock, StageRunner, noted
from rl_trainer.driver.trainer_parts import TrainerParts
from rl_trainer.driver.updates.stages import Updates
from rl_trainer.workers.messages import (
    KeepRowsCall,
    PutRowsCall,
    SavedFiles,
    StageResult,
    StateDigest,
    StateDigestCall,
)

_NO_ROWS = SavedRows(partition=TRAIN_PARTITION, keys=())


class BatchFiles:
    """Keeps what each step has trained on (LoopConfig.keep_batches).

    Lifecycle, in each step: `copy` before its updates, unless it has no rows; `publish` after them.
    The reward worker copies the columns from the data plane; the driver has names and numbers.

    Args:
        parts: of the run, with `batches`.
    """

    def __init__(self, parts: TrainerParts) -> None:
        assert parts.batches is not None
        self._folder = parts.batches
        self._keep = parts.loop.keep_batches
        self._workers = parts.workers
        self._timeout_s = parts.loop.stage_timeout_s
        self._copied: tuple[SavedRows, SavedRows, StepRows, Mapping[str, FileFacts]] | None = None

    async def copy(self, step: int, tagged: KVBatchMeta, rows: StepRows) -> None:
        """Write the columns of a step's trajectories and prompts to disk.

        Args:
            step: number of the step.
            tagged: the trajectories, with tags.
            rows: the same, as the updates get them.

        Raises:
            DataLostError: rows were lost with a storage unit.
            OutputError: they can't be written.
        """
        trajectories = SavedRows(partition=tagged.partition, keys=tagged.keys, tags=tuple(tagged.tags or ()), file=ROWS)
        uids = tuple(dict.fromkeys(RowKey.parse(key).uid for key in tagged.keys))
        prompts = SavedRows(partition=prompt_partition(tagged.partition), keys=uids, file=PROMPTS)
        message = KeepRowsCall(path=str(unpublished(self._folder.path, step)), rows=(trajectories, prompts))
        saved = await call(self._workers.reward, "keep_rows", message, SavedFiles, self._timeout_s)
        self._copied = trajectories, prompts, rows, saved.files

    async def publish(self, step: int, version: int, critic_updates: int, metrics: Mapping[str, float]) -> None:
        """Keep the batch and its results.

        Args:
            step: number of the step.
            version: updates of the actor before it.
            critic_updates: those of the critic.
            metrics: what its updates returned.

        Raises:
            OutputError: it can't be written.
        """
        copied, self._copied = self._copied, None
        rows, prompts, names, files = copied or (_NO_ROWS, _NO_ROWS, None, {})
        batch = KeptBatch(
            step=step,
            version=version,
            critic_updates=critic_updates,
            rows=rows,
            prompts=prompts,
            extra_info=names.names.extra_info if names is not None else {},
            metrics=dict(metrics),
            weights=await state_digests(self._workers, self._timeout_s),
            files=dict(files),
        )
        await asyncio.to_thread(publish, self._folder.path, batch, self._folder.config, self._keep)


async def state_digests(workers: Workers, timeout_s: float) -> dict[str, str]:
    """SHA-256 of weights and optimizer state of each model, by role and rank, such as `actor/0`."""
    ranks = [
        (f"{role}/{rank}", worker)
        for role, members in (("actor", workers.actor), ("critic", workers.critic))
        for rank, worker in enumerate(members)
    ]
    found = await gather_or_cancel(
        *(call(worker, "state_digest", StateDigestCall(), StateDigest, timeout_s) for _, worker in ranks)
    )
    return {name: digest.sha256 for (name, _), digest in zip(ranks, found, strict=True)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Retrained:
    """Results of a step that was trained again."""

    step: int
    metrics: Mapping[str, float]
    weights: Mapping[str, str]
    """As in KeptBatch."""


class BatchTrainer:
    """Trains kept batches again: it puts their rows into the data plane, and repeats the updates.

    Args:
        plane: an empty data plane.
        updates: of the run whose batches they are.
        timeout_s: longest time of one call.
    """

    def __init__(self, plane: DataPlane, updates: Updates, timeout_s: float) -> None:
        self._plane = plane
        self._updates = updates
        self._workers = updates.workers
        self._timeout_s = timeout_s
        self._runner = StageRunner(timeout_s)

    async def train(self, checkpoint: Checkpoint | None, folder: Path, batches: Sequence[KeptBatch]) -> list[Retrained]:
        """Train batches one after the other; returns the state before the first, and the results of
        each.

        Args:
            checkpoint: the state before the first; None: it is the first of the run.
            folder: of the kept batches.
            batches: of consecutive steps, at least one.

        Raises:
            ConfigError: the checkpoint belongs to another model.
            RLError: a worker failed.
        """
        if checkpoint is not None:
            await load(checkpoint, self._workers, self._timeout_s)
        before = await state_digests(self._workers, self._timeout_s)
        found = [Retrained(step=batches[0].step - 1, metrics={}, weights=before)]
        for batch in batches:
            with noted(f"step {batch.step}"):
                found.append(await self._train(folder / step_name(batch.step), batch))
        return found

    async def _train(self, folder: Path, batch: KeptBatch) -> Retrained:
        metrics = dict[str, float]()
        if batch.rows.keys:
            saved = (batch.rows, batch.prompts)
            put = PutRowsCall(path=str(folder), rows=saved)
            await call(self._workers.reward, "put_rows", put, StageResult, self._timeout_s)
            names = KVBatchMeta(
                partition=batch.rows.partition,
                keys=batch.rows.keys,
                tags=batch.rows.tags,
                extra_info=dict(batch.extra_info),
            )
            stages = self._updates.stages(
                batch.step, StepRows.of(names), version=batch.version, critic_updates=batch.critic_updates
            )
            clock = Clock()
            await self._runner.read_ahead(clock, stages)
            metrics = await self._runner.update(clock, stages)
            for rows in saved:
                await self._plane.clear(rows.partition)
        weights = await state_digests(self._workers, self._timeout_s)
        return Retrained(step=batch.step, metrics=metrics, weights=weights)
