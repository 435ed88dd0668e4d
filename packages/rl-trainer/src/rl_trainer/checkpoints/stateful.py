"""The worker's side of a checkpoint: the state is copied while the loop waits, and written by a thread while the next step runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import msgspec

from rl_protocol import WorkerError
from rl_trainer.checkpoints.folder import FileFacts, durable, writing
from rl_trainer.messages import FinishSaveCall, LoadStateCall, SavedFiles, SaveStateCall, StageResult
from rl_trainer.worker import Worker

Write = Callable[[Path], Sequence[Path]]
"""Writes what was copied into a folder, from any thread; returns the files."""


@runtime_checkable
class Resumable(Protocol):
    """A model under training whose state can be kept. On several ranks each call is made on all of them."""

    def snapshot(self) -> Write:
        """Copy weights, optimizer, counters and random state, as far as they are this rank's."""
        ...

    def restore(self, folder: Path) -> None:
        """Take over what a snapshot wrote, of however many ranks.

        Raises:
            ConfigError: it is the state of another model.
        """
        ...


@runtime_checkable
class Exportable(Protocol):
    """A policy that can be handed to users while it goes on training."""

    def export(self) -> Write:
        """Copy the policy; what is written is what `save_pretrained` writes."""
        ...


class StatefulWorker(Worker):
    """A worker that has a part in checkpoints: `save_state` copies, `finish_save` waits for the files, `load_state` takes them over."""

    state_handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {
        "save_state": SaveStateCall,
        "finish_save": FinishSaveCall,
        "load_state": LoadStateCall,
    }
    _writing: asyncio.Task[SavedFiles] | None = None

    def copy_state(self, part: str) -> Mapping[str, Write]:
        """Folder below the checkpoint -> what will write there; `part` is the one of this worker."""
        raise NotImplementedError

    def take_state(self, folder: Path) -> None:
        """Take over the state of this worker's folder."""
        raise NotImplementedError

    async def save_state(self, call: SaveStateCall) -> StageResult:
        """Copy the state and begin to write it.

        Raises:
            WorkerError: the last save was not finished.
        """
        if self._writing is not None:
            raise WorkerError("save_state was called while a save is being written; call finish_save first.")
        root = Path(call.path)
        writes = self.copy_state(call.part)
        self._writing = asyncio.create_task(asyncio.to_thread(_write, root, writes))
        return StageResult()

    async def finish_save(self, call: FinishSaveCall) -> SavedFiles:
        """Wait until everything is on the disk.

        Raises:
            OutputError: it can't be written.
            WorkerError: no save was begun.
        """
        del call
        task, self._writing = self._writing, None
        if task is None:
            raise WorkerError("finish_save was called, and no save was begun.")
        return await task

    async def load_state(self, call: LoadStateCall) -> StageResult:
        """Go on from a checkpoint."""
        self.take_state(Path(call.path))
        return StageResult()


def _write(root: Path, writes: Mapping[str, Write]) -> SavedFiles:
    found: dict[str, FileFacts] = {}
    with writing(root):
        for name, write in writes.items():
            folder = root / name
            folder.mkdir(parents=True, exist_ok=True)
            found |= durable(root, write(folder))
    return SavedFiles(files=found)
