"""Rows by global index: `get_meta`, `put`, `get_data` and clearing of TransferQueue 0.1.11.

A row put without a key gets a hidden one. `global_indexes` count the plane's rows from 0 and are
never reused (`indexes_of`), so stale metadata raises an error instead of reading other rows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tensordict import TensorDict

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.kv_batch_meta import KVBatchMeta as Rows
from rl_protocol.batch.kv_batch_meta import Tag
from rl_protocol.errors import BatchError, ConflictError, MissingDataError, PlaneTimeout
from rl_transferqueue.client.memory_interface import copying
from rl_transferqueue.compat.errors import NotReadyError, StorageKeyNotFoundError
from rl_transferqueue.compat.field_table import FIRST, HIDDEN_KEY, Table, indexes_of, read
from rl_transferqueue.compat.metadata.batch_meta import BatchMeta
from rl_transferqueue.compat.metadata.kv_batch_meta import Meta
from rl_transferqueue.compat.msgpack_values import pack_tag, unpack_tag
from rl_transferqueue.compat.row_selection import fetch
from rl_transferqueue.compat.session import Session
from rl_transferqueue.compat.tensordicts import Parser, parsed, schema_of, to_batch, to_tensordict
from rl_transferqueue.consume.sampled_batches import draws_of

_KEY = "key"
MOST_INSERTED = 1_000_000
"""Rows that one get_meta inserts: their keys are one message, and each takes memory here first."""


async def get_meta(
    session: Session,
    data_fields: list[str],
    batch_size: int,
    partition_id: str,
    mode: str = "fetch",
    task_name: str | None = None,
    sampling_config: dict[str, Any] | None = None,
) -> BatchMeta:
    """Choose rows for a task (fetch), add rows (insert), or list all rows (force_fetch).

    Raises:
        BatchError: the mode is unknown, or `batch_size` is not 0 to MOST_INSERTED for an insert.
        NotReadyError: too few rows were ready before the deadline. In polling mode the result
            is an empty BatchMeta instead.
    """
    if mode == "insert":
        if not 0 <= batch_size <= MOST_INSERTED:
            raise BatchError(f"get_meta inserts 0 to {MOST_INSERTED} rows a call; got batch_size={batch_size}.")
        return await _insert(session, data_fields, batch_size, partition_id)
    if mode == "force_fetch":
        return await _force_fetch(session, data_fields, partition_id)
    if mode != "fetch" or task_name is None:
        raise BatchError(
            f"mode must be fetch (with a task_name), insert or force_fetch; got {mode!r}, task {task_name!r}."
        )
    try:
        rows = await fetch(session, data_fields, batch_size, partition_id, task_name, sampling_config or {})
    except PlaneTimeout as error:
        if session.settings.polling_mode:
            return BatchMeta.empty()
        raise NotReadyError(error.message) from error
    return await describe(session, rows, data_fields)


async def _insert(
    session: Session, fields: Sequence[str], count: int, partition: str, batch: BatchData | None = None
) -> BatchMeta:
    """Add `count` rows, with these columns if there are any."""
    keys = [f"{HIDDEN_KEY}{os.urandom(8).hex()}-{i}" for i in range(count)]
    rows = await session.plane.put(partition, keys, batch, tags=[{}] * count)
    unknown = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": False}
    return _batch_meta(rows, {name: dict(unknown) for name in fields}, np.zeros(count, np.int8))


async def _force_fetch(session: Session, fields: Sequence[str], partition: str) -> BatchMeta:
    rows = await session.plane.list_rows(partition)
    status = await session.plane.production_status(partition, fields=fields)
    every: list[bool] = np.all(status.flags, axis=1).tolist()
    ready = dict(zip(status.keys, every, strict=True))
    flags = np.asarray([ready.get(key, False) for key in rows.keys], dtype=np.int8)
    complete = rows.select_rows(np.flatnonzero(flags))
    schema = schema_of(await read(session.plane, complete, fields)) if complete else {}
    known = {
        name: facts for name, facts in schema.items() if "per_sample_shapes" not in facts or len(complete) == len(rows)
    }
    return _batch_meta(rows, {name: known.get(name, {}) for name in fields}, flags)


async def put(
    session: Session,
    data: TensorDict,
    metadata: BatchMeta | None = None,
    partition_id: str | None = None,
    data_parser: Parser | None = None,
) -> BatchMeta:
    """Store fields of the rows of `metadata`, or of new rows of `partition_id`.

    The tags of `metadata` are stored too.

    Raises:
        BatchError: neither `metadata` nor `partition_id`, or no rows.
        StorageKeyNotFoundError: a row of `metadata` was cleared; nothing is stored in its
            partition.
    """
    if metadata is None and partition_id is None:
        raise BatchError("put needs metadata, or the partition_id for new rows.")
    batch = to_batch(parsed(data, data_parser) if data_parser is not None else data)
    if not (len(batch) if metadata is None else metadata.size):
        raise BatchError("put needs at least one row.")
    if metadata is None:
        return (await _insert(session, [], len(batch), str(partition_id), batch)).add_fields(data)
    if len(batch) != metadata.size:
        raise BatchError(f"put needs one row per row of metadata: {metadata.size} rows, {len(batch)} in the data.")
    for partition, places in _by_partition(metadata).items():
        rows = await _rows(session, metadata, partition, places)
        tags = [pack_tag(metadata.custom_meta[place]) for place in places]
        await _store(session, rows, batch.select_rows(places), tags)
    return metadata.add_fields(data)


async def set_custom_meta(session: Session, metadata: BatchMeta) -> None:
    """Store the tags of rows."""
    for partition, places in _by_partition(metadata).items():
        rows = await _rows(session, metadata, partition, places)
        await _store(session, rows, None, [pack_tag(metadata.custom_meta[place]) for place in places])


async def _store(session: Session, rows: Rows, batch: BatchData | None, tags: Sequence[Tag]) -> None:
    try:
        await session.plane.get(rows, [])  # raises if a row was cleared and its key put again
        await session.plane.put(rows.partition, rows.keys, batch, tags=tags, expect=[{}] * len(rows))
    except (ConflictError, MissingDataError) as error:
        raise StorageKeyNotFoundError(f"A row was cleared since its metadata was made: {error.message}") from error


async def get_data(session: Session, metadata: BatchMeta) -> TensorDict:
    """The fields of the rows, in their order.

    Raises:
        StorageKeyNotFoundError: a row or column is missing, or a row was cleared and put again.
    """
    if not metadata.size or not metadata.field_names:
        return TensorDict({}, batch_size=0)
    parts: list[Table] = []
    order: list[int] = []
    for partition, places in _by_partition(metadata).items():
        rows = await _rows(session, metadata, partition, places)
        try:
            parts.append(await read(session.plane, rows, metadata.field_names))
        except MissingDataError as error:
            raise StorageKeyNotFoundError(error.message) from error
        order += places
    whole = parts[0] if len(parts) == 1 else Table.concat(parts)
    table = whole if order == sorted(order) else whole.select_rows(np.argsort(order).tolist())
    return await copying(table.nbytes, lambda: to_tensordict(table))


async def clear_partition(session: Session, partition_id: str) -> None:
    """Remove a partition and its draws."""
    session.settings.sampler.clear_cache(partition_id)
    await session.plane.clear(draws_of(partition_id))
    await session.plane.clear(partition_id)


async def clear_samples(session: Session, metadata: BatchMeta) -> None:
    """Remove rows, except those that were cleared meanwhile."""
    for partition, places in _by_partition(metadata).items():
        rows = await _rows(session, metadata, partition, places)
        now = await session.plane.list_rows(partition)
        same = set(zip(now.keys, now.generations, strict=True))
        mine = zip(rows.keys, rows.generations, strict=True)
        await session.plane.clear(partition, [key for key, index in mine if (key, index) in same])


async def describe(session: Session, rows: Rows, fields: Sequence[str]) -> BatchMeta:
    """Metadata of rows that have the fields. Reads the rows to learn their shapes."""
    schema = schema_of(await read(session.plane, rows, fields)) if rows and fields else {}
    return _batch_meta(rows, schema, np.ones(len(rows), np.int8))


async def _rows(session: Session, metadata: BatchMeta, partition: str, places: Sequence[int]) -> Rows:
    """The rows at some places of the metadata.

    Metadata that a user built has only global indexes, so their keys are looked up.
    """
    indexes = [metadata.global_indexes[place] for place in places]
    known: list[Any] = [metadata.backend_meta[place].get(_KEY) for place in places]
    if None in known:
        listed = await session.plane.list_rows(partition)
        key_of = dict(zip(indexes_of(listed), listed.keys, strict=True))
        missing = [index for index in indexes if index not in key_of]
        if missing:
            raise StorageKeyNotFoundError(f"Partition {partition!r} has no rows with the numbers {missing[:8]}.")
        known = [key_of[index] for index in indexes]
    return Rows(partition=partition, keys=tuple(known), generations=tuple(index + FIRST for index in indexes))


def _batch_meta(rows: Rows, schema: Mapping[str, Meta], ready: Any) -> BatchMeta:
    return BatchMeta(
        indexes_of(rows),
        [rows.partition] * len(rows),
        dict(schema),
        ready,
        custom_meta=[unpack_tag(tag) for tag in rows.tags],
        _custom_backend_meta=[{_KEY: key} for key in rows.keys],
    )


def _by_partition(metadata: BatchMeta) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for place, partition in enumerate(metadata.partition_ids):
        places.setdefault(partition, []).append(place)
    return places
