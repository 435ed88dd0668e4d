"""Rows by key: the operations behind the kv functions of TransferQueue 0.1.11."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict

from rl_protocol.batch.kv_batch_meta import KVBatchMeta as Rows
from rl_protocol.errors import BatchError, MissingDataError
from rl_transferqueue.client.memory_interface import copying
from rl_transferqueue.compat.errors import KeyNotFoundError, StorageKeyNotFoundError
from rl_transferqueue.compat.field_table import HIDDEN_KEY, indexes_of, read
from rl_transferqueue.compat.metadata.batch_meta import BatchMeta
from rl_transferqueue.compat.metadata.kv_batch_meta import Meta
from rl_transferqueue.compat.msgpack_values import pack_tag, unpack_tag
from rl_transferqueue.compat.rows_by_index import describe
from rl_transferqueue.compat.session import Session
from rl_transferqueue.compat.tensordicts import Parser, parsed, to_batch, to_tensordict
from rl_transferqueue.consume.sampled_batches import draws_of


async def put_rows(
    session: Session,
    keys: Sequence[str],
    partition: str,
    fields: TensorDict | None,
    tags: Sequence[Meta] | None,
    data_parser: Parser | None = None,
) -> Rows:
    """Store fields and tags of named rows; return the rows with all their fields and tags."""
    if fields is not None:
        fields = parsed(fields, data_parser) if data_parser is not None else fields
    batch = to_batch(fields) if fields is not None else None
    await session.plane.put(partition, keys, batch, tags=None if tags is None else [pack_tag(tag) for tag in tags])
    return await session.plane.list_rows(partition, keys=keys)


async def get_rows(
    session: Session, keys: Sequence[str], partition: str, select_fields: Sequence[str] | None
) -> TensorDict:
    """Fields of named rows.

    Raises:
        StorageKeyNotFoundError: a row, or a column of a row, is missing.
    """
    try:
        shared = (await session.plane.list_rows(partition, keys=keys)).fields if select_fields is None else ()
        fields = sorted(shared) if select_fields is None else select_fields
        table = await read(session.plane, Rows(partition=partition, keys=tuple(keys)), fields)
    except MissingDataError as error:
        raise StorageKeyNotFoundError(error.message) from error
    return await copying(table.nbytes, lambda: to_tensordict(table))


async def list_partitions(session: Session) -> list[str]:
    """Partitions that have rows."""
    return [name for name in (await session.plane.stats()).rows if not name.endswith(draws_of(""))]


async def kv_list(session: Session, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
    """Tags by partition and key."""
    names = await list_partitions(session) if partition_id is None else [partition_id]
    listed = [await session.plane.list_rows(name) for name in names]
    return {
        rows.partition: {
            k: unpack_tag(t) for k, t in zip(rows.keys, rows.tags, strict=True) if not k.startswith(HIDDEN_KEY)
        }
        for rows in listed
        if rows
    }


async def kv_retrieve_meta(
    session: Session, keys: list[str] | str, partition_id: str, create: bool = False
) -> BatchMeta:
    """Metadata of named rows; `create` adds the rows that are missing."""
    names = _key_list(keys)
    if create:
        await session.plane.put(partition_id, names, tags=[{}] * len(names))
    try:
        rows = await session.plane.list_rows(partition_id, keys=names)
    except MissingDataError as error:
        raise StorageKeyNotFoundError(error.message) from error
    return await describe(session, rows, rows.fields)


async def kv_retrieve_keys(session: Session, global_indexes: list[int] | int, partition_id: str) -> list[str]:
    """Keys of the rows with these global indexes.

    Raises:
        KeyNotFoundError: no row with a key has one of the indexes.
    """
    wanted = [global_indexes] if isinstance(global_indexes, int) else global_indexes
    if not wanted:
        raise BatchError("kv_retrieve_keys needs at least one global index.")
    rows = await session.plane.list_rows(partition_id)
    key_of = {
        index: key for index, key in zip(indexes_of(rows), rows.keys, strict=True) if not key.startswith(HIDDEN_KEY)
    }
    missing = [index for index in wanted if index not in key_of]
    if missing:
        raise KeyNotFoundError(f"No keys for the global indexes {missing[:8]} in partition {partition_id!r}.")
    return [key_of[index] for index in wanted]


async def clear_keys(session: Session, keys: Sequence[str], partition: str) -> None:
    """Remove rows; missing rows are ignored."""
    await session.plane.clear(partition, keys)


def _key_list(keys: list[str] | str) -> list[str]:
    names = [keys] if isinstance(keys, str) else list(keys)
    if not names:
        raise BatchError("At least one key is needed; got an empty list.")
    return names
