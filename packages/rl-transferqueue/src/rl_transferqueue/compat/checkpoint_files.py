"""Files of a checkpoint of a whole plane, without pickle.

metadata.json            {"storage_saved": bool, "user_metadata": {...}}
controller_state.msgpack rows with tags, oldest first, and the rows each task has consumed
storage_state.msgpack    which rows and columns are in which file
storage_00000.batch ...  batches of at most 1024 rows, in wire format 1
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rl_protocol import wire
from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.kv_batch_meta import KVBatchMeta, Tag
from rl_protocol.errors import UNREADABLE, WireError
from rl_transferqueue.client.client import Client
from rl_transferqueue.compat.field_table import alike
from rl_transferqueue.compat.session import Session

ROWS_FILE = "controller_state.msgpack"
INDEX_FILE = "storage_state.msgpack"
_ROWS_PER_FILE = 1024


class SavedPartition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rows of one partition, oldest first."""

    name: str
    keys: tuple[str, ...]
    tags: tuple[Tag, ...]
    consumed: dict[str, tuple[int, ...]]
    """Task -> places in `keys`."""


class SavedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file that holds some columns of some rows."""

    partition: str
    keys: tuple[str, ...]
    file: str


async def save_rows(session: Session, path: Path) -> None:
    """Write rows, tags and consumption of all partitions to one file."""
    stats = await session.plane.stats()
    saved = [await _saved(session.plane, name, stats.tasks.get(name, ())) for name in stats.rows]
    await asyncio.to_thread(path.write_bytes, msgspec.msgpack.encode(saved))


async def _saved(plane: Client, name: str, tasks: Sequence[str]) -> SavedPartition:
    rows = await plane.list_rows(name)
    place = {key: i for i, key in enumerate(rows.keys)}
    consumed: dict[str, tuple[int, ...]] = {}
    for task in tasks:
        status = await plane.consumption_status(name, task=task)
        consumed[task] = tuple(
            place[key] for key, done in zip(status.keys, status.flags, strict=True) if done and key in place
        )
    return SavedPartition(name, rows.keys, tuple(rows.tags), consumed)


async def load_rows(session: Session, path: Path) -> None:
    """Replace all rows of the plane by those of a file, in the same order, without columns.

    Raises:
        WireError: the file is damaged.
    """
    saved = _decode(await asyncio.to_thread(path.read_bytes), list[SavedPartition], path)
    for name in (await session.plane.stats()).rows:
        await session.plane.clear(name)
    for part in saved:
        await session.plane.put(part.name, part.keys, tags=part.tags)
        for task, places in part.consumed.items():
            await session.plane.claim(part.name, [part.keys[place] for place in places], task=task)


async def save_columns(session: Session, folder: Path) -> None:
    """Write the columns of all partitions to files of a folder."""
    index: list[SavedFile] = []
    stats = await session.plane.stats()
    for name in stats.rows:
        for rows, fields in await _same_fields(session.plane, name, stats.columns.get(name, ())):
            for start in range(0, len(rows), _ROWS_PER_FILE):
                part = rows.slice(start, min(start + _ROWS_PER_FILE, len(rows)))
                for some, batch in await alike(session.plane, part, fields):
                    file = f"storage_{len(index):05d}.batch"
                    await asyncio.to_thread(_write, folder / file, batch)
                    index.append(SavedFile(name, some.keys, file))
    await asyncio.to_thread((folder / INDEX_FILE).write_bytes, msgspec.msgpack.encode(index))


async def _same_fields(plane: Client, partition: str, fields: Sequence[str]) -> list[tuple[KVBatchMeta, list[str]]]:
    """Rows of a partition, grouped by the columns they have; rows without any are left out."""
    rows = await plane.list_rows(partition)
    status = await plane.production_status(partition, fields=fields)
    has = dict(zip(status.keys, status.flags, strict=True))
    groups: dict[tuple[bool, ...], list[int]] = {}
    for place, key in enumerate(rows.keys):
        if key in has and has[key].any():
            groups.setdefault(tuple(has[key].tolist()), []).append(place)
    return [
        (rows.select_rows(places), [name for name, there in zip(fields, pattern, strict=True) if there])
        for pattern, places in groups.items()
    ]


async def load_columns(session: Session, folder: Path) -> None:
    """Put the columns of a folder.

    Raises:
        WireError: a file is damaged.
    """
    path = folder / INDEX_FILE
    for entry in _decode(await asyncio.to_thread(path.read_bytes), list[SavedFile], path):
        file = folder / Path(entry.file).name
        batch = wire.decode(await asyncio.to_thread(file.read_bytes))
        await session.plane.put(entry.partition, entry.keys, batch)


def _write(path: Path, batch: BatchData) -> None:
    with path.open("wb") as file:
        for buffer in wire.encode(batch):
            file.write(buffer)


def _decode(data: bytes, kind: Any, path: Path) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNREADABLE as error:
        raise WireError(f"{path} is not part of a checkpoint of this version: {error}.") from error
