"""The worker's side of a checkpoint: state is copied while the loop waits, and written during the
next step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import msgspec

from rl_protocol import WorkerError
from rl_protocol.support.fault_points import FaultPoint, reach
from rl_trainer.checkpoints.checkpoint_folder import FileFacts, durable, writing
from rl_trainer.checkpoints.resumable import Write
from rl_trainer.workers.base import Worker
from rl_trainer.workers.messages import FinishSaveCall, LoadStateCall, SavedFiles, SaveStateCall, StageResult


class StatefulWorker(Worker):
    """A worker with state in checkpoints.

    `save_state` copies the state, `finish_save` waits for the files, `load_state` restores them.
    """

    state_handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {
        "save_state": SaveStateCall,
        "finish_save": FinishSaveCall,
        "load_state": LoadStateCall,
    }
    _writing: asyncio.Task[SavedFiles] | None = None

    def copy_state(self, part: str) -> Mapping[str, Write]:
        """Copy the state; returns writers by folder below the checkpoint. `part` is this worker's
        folder.
        """
        raise NotImplementedError

    def take_state(self, folder: Path) -> None:
        """Restore the state from this worker's folder."""
        raise NotImplementedError

    async def save_state(self, call: SaveStateCall) -> StageResult:
        """Copy the state and begin to write it.

        Raises:
            WorkerError: the last save is not finished.
        """
        if self._writing is not None:
            raise WorkerError("save_state was called while a save is being written; call finish_save first.")
        root = Path(call.path)
        writes = self.copy_state(call.part)
        self._writing = asyncio.create_task(asyncio.to_thread(_write, root, writes))
        return StageResult()

    async def finish_save(self, call: FinishSaveCall) -> SavedFiles:
        """Wait until everything is on disk.

        Raises:
            OutputError: the state can't be written.
            WorkerError: no save was begun.
        """
        del call
        task, self._writing = self._writing, None
        if task is None:
            raise WorkerError("finish_save was called, and no save was begun.")
        return await task

    async def load_state(self, call: LoadStateCall) -> StageResult:
        """Restore the state from a checkpoint."""
        self.take_state(Path(call.path))
        return StageResult()


def _write(root: Path, writes: Mapping[str, Write]) -> SavedFiles:
    found: dict[str, FileFacts] = {}
    with writing(root):
        for name, write in writes.items():
            folder = root / name
            folder.mkdir(parents=True, exist_ok=True)
            found |= durable(root, write(folder))
    reach(FaultPoint.STATE_WRITTEN)
    return SavedFiles(files=found)
