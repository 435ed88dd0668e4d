"""Copies rows of the data plane into a checkpoint, and puts them back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_protocol import BatchData, wire
from rl_protocol.ports import DataPlane
from rl_trainer.checkpoints.held_batches import HELD, SavedRows
from rl_trainer.checkpoints.resumable import Write
from rl_trainer.workers.messages import CopyRowsCall, PutRowsCall, StageResult


class RowFiles:
    """The files of a worker that have rows of the data plane, in wire format.

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

    async def put(self, call: PutRowsCall) -> StageResult:
        """Put rows with their tags and the columns of their files.

        Raises:
            WireError: a file is damaged.
            BatchError: a file has another number of rows.
        """
        for rows in call.rows:
            data = None
            if rows.file:
                data = wire.decode(await asyncio.to_thread((Path(call.path) / rows.file).read_bytes))
            await self._plane.put(rows.partition, rows.keys, data, tags=rows.tags or None)
        return StageResult()
