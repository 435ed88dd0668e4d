"""The driver's side of a checkpoint; every worker writes its own files."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from rl_protocol import RLError
from rl_trainer.asyncio_tasks import deadline, gather_or_cancel
from rl_trainer.checkpoints.checkpoint_folder import (
    CONFIG,
    RUN_STATE,
    Checkpoint,
    FileFacts,
    Manifest,
    RunState,
    durable,
    prune,
    publish,
    saving_folder,
    step_name,
    sweep,
    writing,
)
from rl_trainer.checkpoints.held_batches import HELD, INDEX, HeldBatches
from rl_trainer.driver.stage_calls import WorkerHandle, Workers, call
from rl_trainer.workers.messages import FinishSaveCall, LoadStateCall, SavedFiles, SaveStateCall, StageResult

logger = logging.getLogger(__name__)
Score = float | asyncio.Future[float | None] | None
"""By which checkpoints are compared; a future is cancelled if its validation fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that was written and published."""

    step: int
    num_bytes: int
    seconds: float
    """From the copy of the state to the publication."""

    def metrics(self) -> dict[str, float]:
        """The metrics of the step in which it was finished."""
        return {
            "checkpoint/step": float(self.step),
            "checkpoint/bytes": float(self.num_bytes),
            "checkpoint/seconds": self.seconds,
        }


class CheckpointWriter:
    """Saves a run while it continues; one save at a time.

    Lifecycle: call `begin` for each save, `poll` after each step, and `finish` before the run ends.

    Args:
        folder: absolute path of the checkpoints; created with the first one.
        config: the configuration of the run, YAML.
        inputs: SHA-256 of the files that the run reads, by setting and path.
        keep: number of newest checkpoints to keep, beside the best one; 0: all.
        workers: the workers that hold state.
        timeout_s: longest time of a worker to copy its state, and to write it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        config: str,
        inputs: Mapping[str, Mapping[str, str]] | None = None,
        keep: int,
        workers: Workers,
        timeout_s: float,
    ) -> None:
        self._folder = folder
        self._config = config
        self._inputs = {key: dict(files) for key, files in (inputs or {}).items()}
        self._keep = keep
        self._roles = state_holders(workers)
        self._timeout_s = timeout_s
        self._saving: asyncio.Task[SavedCheckpoint] | None = None

    def folder_of(self, step: int) -> Path:
        """Folder of the checkpoint of that step."""
        return self._folder / step_name(step)

    async def begin(self, state: RunState, score: Score, held: HeldBatches | None = None) -> None:
        """Have all workers copy their state, and write it in the background.

        Waits for the previous save first. A score that is a future is waited for before the
        checkpoint is published. `held` are batches whose rows a worker has copied.

        Raises:
            OutputError: this or the previous checkpoint can't be written.
            WorkerError: a worker died, or did not answer in time.
        """
        await self.finish()
        temporary = saving_folder(self.folder_of(state.step))
        with writing(self._folder):
            sweep(self._folder)
            temporary.mkdir(parents=True)
        start = time.perf_counter()
        calls = [
            call(rank, "save_state", SaveStateCall(path=str(temporary), part=role), StageResult, self._timeout_s)
            for role, rank in self._roles
        ]
        await gather_or_cancel(*calls)
        self._saving = asyncio.create_task(self._write(temporary, state, score, held, start))

    def poll(self) -> SavedCheckpoint | None:
        """The checkpoint that was finished since the last call; None if there is none.

        Raises:
            RLError: the save failed.
        """
        if self._saving is None or not self._saving.done():
            return None
        task, self._saving = self._saving, None
        return task.result()

    async def finish(self) -> SavedCheckpoint | None:
        """Wait for the save that is being written; see `poll`."""
        if self._saving is not None:
            async with deadline(2 * self._timeout_s, "the checkpoint that is being written"):
                await asyncio.wait([self._saving])
        return self.poll()

    async def abandon(self, *, wait: bool) -> None:
        """Stop after a failure of the run.

        With `wait` the current save may finish; otherwise it is cancelled. A failed save is logged.
        """
        task, self._saving = self._saving, None
        if task is None:
            return
        if not wait:
            task.cancel()
        done, _ = await asyncio.wait([task], timeout=self._timeout_s)
        if done and not task.cancelled() and isinstance(error := task.exception(), RLError):
            logger.error("The checkpoint that was being written is lost: %s", error)

    async def _write(
        self, temporary: Path, state: RunState, score: Score, held: HeldBatches | None, start: float
    ) -> SavedCheckpoint:
        """Collect the files of the workers, add those of the driver, and publish the checkpoint."""
        calls = [call(rank, "finish_save", FinishSaveCall(), SavedFiles, self._timeout_s) for _, rank in self._roles]
        files: dict[str, FileFacts] = {}
        for saved in await gather_or_cancel(*calls):
            files |= saved.files
        if isinstance(score, asyncio.Future):
            score = await score
        await asyncio.to_thread(self._publish, temporary, state, score, held, files)
        return SavedCheckpoint(
            step=state.step,
            num_bytes=sum(file.num_bytes for file in files.values()),
            seconds=time.perf_counter() - start,
        )

    def _publish(
        self,
        temporary: Path,
        state: RunState,
        score: float | None,
        held: HeldBatches | None,
        files: Mapping[str, FileFacts],
    ) -> None:
        config = self._config.encode()
        with writing(temporary):
            (temporary / CONFIG).write_bytes(config)
            (temporary / RUN_STATE).write_bytes(msgspec.json.encode(state))
            names = [CONFIG, RUN_STATE]
            if held is not None:
                (temporary / HELD).mkdir(exist_ok=True)
                (temporary / INDEX).write_bytes(msgspec.msgpack.encode(held))
                names.append(INDEX)
            own = durable(temporary, [temporary / name for name in names])
        manifest = Manifest(
            step=state.step,
            score=score,
            written=datetime.now(UTC).isoformat(timespec="seconds"),
            software=_software(),
            config_sha256=hashlib.sha256(config).hexdigest(),
            inputs=self._inputs,
            files={**files, **own},
        )
        publish(temporary, self.folder_of(state.step), manifest)
        prune(self._folder, self._keep, state.step)


async def load(checkpoint: Checkpoint, workers: Workers, timeout_s: float) -> None:
    """Have every worker restore its state.

    Raises:
        ConfigError: the checkpoint belongs to another model.
        WorkerError: a worker died, or did not answer in time.
    """
    calls = [
        call(rank, "load_state", LoadStateCall(path=str(checkpoint.folder / role)), StageResult, timeout_s)
        for role, rank in state_holders(workers)
    ]
    await gather_or_cancel(*calls)


def state_holders(workers: Workers) -> Sequence[tuple[str, WorkerHandle]]:
    """(role, worker) of all workers that have state in a checkpoint."""
    ranks = {"actor": workers.actor, "critic": workers.critic, "reward": [workers.reward]}
    return [(role, rank) for role, members in ranks.items() for rank in members]


def _software() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("rl-trainer", "rl-app-ppo", "torch", "transformers", "peft"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
