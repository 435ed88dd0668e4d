"""The driver's side of a checkpoint: names and small numbers; every worker writes its own files."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from rl_protocol import RLError
from rl_trainer.checkpoints.folder import (
    CONFIG,
    RUN_STATE,
    Checkpoint,
    FileFacts,
    Manifest,
    RunState,
    durable,
    prune,
    publish,
    step_name,
    sweep,
    writing,
)
from rl_trainer.dispatch import WorkerHandle, Workers, call, together
from rl_trainer.messages import FinishSaveCall, LoadStateCall, SavedFiles, SaveStateCall, StageResult

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """Saves a run while it goes on: `begin` returns as soon as every worker has a copy of its state; one save at a time.

    Lifecycle: `begin` as often as wished; `metrics` after each step; `finish` before the run ends.

    Args:
        folder: where checkpoints are kept, absolute; made when the first is written.
        config: the configuration of the run, YAML.
        keep: how many of the newest stay, beside the best; 0: all.
        workers: who holds state.
        timeout_s: longest a worker may take to copy, and to write.
    """

    def __init__(self, folder: Path, *, config: str, keep: int, workers: Workers, timeout_s: float) -> None:
        self._folder = folder
        self._config = config
        self._keep = keep
        self._roles = state_holders(workers)
        self._timeout_s = timeout_s
        self._saving: asyncio.Task[dict[str, float]] | None = None

    def folder_of(self, step: int) -> Path:
        """Where the checkpoint of that step is, once it is whole."""
        return self._folder / step_name(step)

    async def begin(self, state: RunState, score: float | None) -> None:
        """Copy everything and begin to write it, after the save before it is done.

        Raises:
            OutputError: this or the last checkpoint can't be written.
            WorkerError: a worker died, or did not answer in time.
        """
        await self.finish()
        temporary = self._folder / f".saving-{step_name(state.step)}"
        with writing(self._folder):
            sweep(self._folder)
            temporary.mkdir(parents=True)
        start = time.perf_counter()
        calls = [
            call(rank, "save_state", SaveStateCall(path=str(temporary), part=role), StageResult, self._timeout_s)
            for role, rank in self._roles
        ]
        await together(*calls)
        self._saving = asyncio.create_task(self._write(temporary, state, score, start))

    def metrics(self) -> dict[str, float]:
        """Of the save that was finished since they were asked for last; empty where there is none.

        Raises:
            RLError: that save failed.
        """
        if self._saving is None or not self._saving.done():
            return {}
        task, self._saving = self._saving, None
        return task.result()

    async def finish(self) -> dict[str, float]:
        """Wait for the save that is being written; see `metrics`."""
        if self._saving is not None:
            await asyncio.wait([self._saving])
        return self.metrics()

    async def abandon(self, *, wait: bool) -> None:
        """The run fails: let the save that is being written be done if it can (`wait`), or leave it unfinished. Its failure is logged."""
        task, self._saving = self._saving, None
        if task is None:
            return
        if not wait:
            task.cancel()
        done, _ = await asyncio.wait([task], timeout=self._timeout_s)
        if done and not task.cancelled() and isinstance(error := task.exception(), RLError):
            logger.error("The checkpoint that was being written is lost: %s", error)

    async def _write(self, temporary: Path, state: RunState, score: float | None, start: float) -> dict[str, float]:
        """Gather what the workers write, add what the driver knows, and publish."""
        calls = [call(rank, "finish_save", FinishSaveCall(), SavedFiles, self._timeout_s) for _, rank in self._roles]
        files: dict[str, FileFacts] = {}
        for saved in await together(*calls):
            files |= saved.files
        await asyncio.to_thread(self._publish, temporary, state, score, files)
        return {
            "checkpoint/step": float(state.step),
            "checkpoint/bytes": float(sum(file.num_bytes for file in files.values())),
            "checkpoint/seconds": time.perf_counter() - start,
        }

    def _publish(self, temporary: Path, state: RunState, score: float | None, files: Mapping[str, FileFacts]) -> None:
        config = self._config.encode()
        with writing(temporary):
            (temporary / CONFIG).write_bytes(config)
            (temporary / RUN_STATE).write_bytes(msgspec.json.encode(state))
            own = durable(temporary, [temporary / CONFIG, temporary / RUN_STATE])
        manifest = Manifest(
            step=state.step,
            score=score,
            written=datetime.now(UTC).isoformat(timespec="seconds"),
            software=_software(),
            config_sha256=hashlib.sha256(config).hexdigest(),
            files={**files, **own},
        )
        publish(temporary, self.folder_of(state.step), manifest)
        prune(self._folder, self._keep)


async def load(checkpoint: Checkpoint, workers: Workers, timeout_s: float) -> None:
    """Have every worker take over its state.

    Raises:
        ConfigError: the checkpoint is that of another model.
        WorkerError: a worker died, or did not answer in time.
    """
    calls = [
        call(rank, "load_state", LoadStateCall(path=str(checkpoint.folder / role)), StageResult, timeout_s)
        for role, rank in state_holders(workers)
    ]
    await together(*calls)


def state_holders(workers: Workers) -> Sequence[tuple[str, WorkerHandle]]:
    """(role, worker) of everyone with a part in a checkpoint."""
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
