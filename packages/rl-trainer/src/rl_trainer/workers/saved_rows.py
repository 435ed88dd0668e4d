"""Copies rows of the data plane into checkpoints and kept batches, and puts them back."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_protocol import BatchData, wire
from rl_protocol.ports import DataPlane
from rl_trainer.checkpoints import kept_batches
from rl_trainer.checkpoints.checkpoint_folder import durable
from rl_trainer.checkpoints.held_batches import HELD, SavedRows
from rl_trainer.checkpoints.resumable import Write
from rl_trainer.workers.messages import CopyRowsCall, KeepRowsCall, PutRowsCall, SavedFiles, StageResult


class RowFiles:
    """The files of a worker that have rows of the data plane: in wire format, those of kept batches
    as safetensors.

    Lifecycle: `copy` before a save, whose writers include those of `take_writes`.

    Args:
        plane: where the rows are.
    """

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._copied: dict[str, BatchData] = {}

    async def copy(self, call: CopyRowsCall) -> StageResult:
        """Read all columns of the rows, to be written with the next save.

        Raises:
            DataLostError: rows were lost with a storage unit.
            MissingDataError: a row does not exist.
        """
        self._copied = {rows.file: await self._read(rows) for rows in call.rows}
        return StageResult()

    async def _read(self, rows: SavedRows) -> BatchData:
        meta = await self._plane.list_rows(rows.partition, keys=rows.keys)
        return await self._plane.get(meta, meta.fields)

    def take_writes(self) -> Mapping[str, Write]:
        """Writers of the copied rows, by folder; none if nothing was copied since the last call."""
        batches, self._copied = self._copied, {}
        if not batches:
            return {}

        def write(folder: Path) -> Sequence[Path]:
            for name, batch in batches.items():
                with (folder / name).open("wb") as file:
                    file.writelines(wire.encode(batch))
            return [folder / name for name in batches]

        return {HELD: write}

    async def keep(self, call: KeepRowsCall) -> SavedFiles:
        """Read all columns of the rows, and write them to disk.

        Raises:
            DataLostError: rows were lost with a storage unit.
            OutputError: a file can't be written.
        """
        batches = {rows.file: await self._read(rows) for rows in call.rows}
        return await asyncio.to_thread(_write_kept, Path(call.path), batches)

    async def put(self, call: PutRowsCall) -> StageResult:
        """Put rows with their tags and the columns of their files.

        Raises:
            WireError: a file is damaged; ConfigError: one of a kept batch.
            BatchError: a file has another number of rows.
        """
        for rows in call.rows:
            data = None
            if rows.file:
                data = await asyncio.to_thread(_read_file, Path(call.path) / rows.file)
            await self._plane.put(rows.partition, rows.keys, data, tags=rows.tags or None)
        return StageResult()


def _read_file(path: Path) -> BatchData:
    if path.name in (kept_batches.ROWS, kept_batches.PROMPTS):
        return kept_batches.read_columns(path)
    return wire.decode(path.read_bytes())


def _write_kept(folder: Path, batches: Mapping[str, BatchData]) -> SavedFiles:
    with kept_batches.writing(folder):
        if folder.exists():  # of an attempt at the step whose rows were lost
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        for name, data in batches.items():
            kept_batches.write_columns(folder / name, data)
        return SavedFiles(files=durable(folder, [folder / name for name in batches]))
