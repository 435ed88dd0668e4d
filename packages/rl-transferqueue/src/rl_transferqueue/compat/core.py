"""What the compatible clients do, in terms of a data plane. Async; everything here runs on the loop of the plane's client.

Rows that were put without a key get one that no user sees. `global_indexes` count the rows of the plane from 0
(`table.indexes_of`): a number is never given to a second row, so metadata that outlives its rows gets an error, never
the data of others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from rl_protocol.batch import BatchData
from rl_protocol.errors import BatchError, ConflictError, MissingDataError, PlaneTimeout
from rl_protocol.meta import KVBatchMeta as Rows
from rl_protocol.meta import Tag
from rl_transferqueue.client import Client
from rl_transferqueue.compat.convert import parsed, schema_of, to_batch, to_tensordict
from rl_transferqueue.compat.errors import KeyNotFoundError, NotReadyError, StorageKeyNotFoundError
from rl_transferqueue.compat.fetching import Settings, fetch
from rl_transferqueue.compat.metadata.batch_meta import BatchMeta
from rl_transferqueue.compat.metadata.kv_batch_meta import Meta
from rl_transferqueue.compat.objects import pack_tag, unpack_tag
from rl_transferqueue.compat.table import FIRST, Table, indexes_of, read
from rl_transferqueue.draws import draws_of
from rl_transferqueue.memory import copying

_UNNAMED = "\x00"
"""First character of the keys of rows that the user gave none."""
_KEY = "key"
_DRAWS = draws_of("")
"""How the names of partitions end that users do not see."""

Parser = Callable[[dict[str, Any]], object]


class Core:
    """The operations of a client of 0.1.11."""

    def __init__(self, plane: Client, settings: Settings) -> None:
        self.plane = plane
        self.settings = settings

    # -- rows by key
    async def put_rows(
        self,
        keys: Sequence[str],
        partition: str,
        fields: TensorDict | None,
        tags: Sequence[Meta] | None,
        data_parser: Parser | None = None,
    ) -> Rows:
        """Store fields and tags of named rows; returns all that is now known of them."""
        if fields is not None:
            fields = parsed(fields, data_parser) if data_parser is not None else fields
        batch = to_batch(fields) if fields is not None else None
        await self.plane.put(partition, keys, batch, tags=None if tags is None else [pack_tag(tag) for tag in tags])
        return await self.plane.list_rows(partition, keys=keys)

    async def get_rows(self, keys: Sequence[str], partition: str, select_fields: Sequence[str] | None) -> TensorDict:
        """Fields of named rows.

        Raises:
            StorageKeyNotFoundError: a row, or a column of a row, that is not there.
        """
        try:
            shared = (await self.plane.list_rows(partition, keys=keys)).fields if select_fields is None else ()
            fields = sorted(shared) if select_fields is None else select_fields
            table = await read(self.plane, Rows(partition=partition, keys=tuple(keys)), fields)
        except MissingDataError as error:
            raise StorageKeyNotFoundError(error.message) from error
        return await copying(table.nbytes, lambda: to_tensordict(table))

    async def list_partitions(self) -> list[str]:
        """Partitions that have rows."""
        return [name for name in (await self.plane.stats()).rows if not name.endswith(_DRAWS)]

    async def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        """partition -> key -> tags."""
        names = await self.list_partitions() if partition_id is None else [partition_id]
        listed = [await self.plane.list_rows(name) for name in names]
        return {
            rows.partition: {
                k: unpack_tag(t) for k, t in zip(rows.keys, rows.tags, strict=True) if not k.startswith(_UNNAMED)
            }
            for rows in listed
            if rows
        }

    async def kv_retrieve_meta(self, keys: list[str] | str, partition_id: str, create: bool = False) -> BatchMeta:
        """Metadata of named rows; `create` makes those that are not there."""
        names = _key_list(keys)
        if create:
            await self.plane.put(partition_id, names, tags=[{}] * len(names))
        try:
            rows = await self.plane.list_rows(partition_id, keys=names)
        except MissingDataError as error:
            raise StorageKeyNotFoundError(error.message) from error
        return await self._describe(rows, rows.fields)

    async def kv_retrieve_keys(self, global_indexes: list[int] | int, partition_id: str) -> list[str]:
        """Keys of rows by number.

        Raises:
            KeyNotFoundError: a number that no row with a key has.
        """
        wanted = [global_indexes] if isinstance(global_indexes, int) else global_indexes
        if not wanted:
            raise BatchError("kv_retrieve_keys needs at least one global index.")
        rows = await self.plane.list_rows(partition_id)
        key_of = {
            index: key for index, key in zip(indexes_of(rows), rows.keys, strict=True) if not key.startswith(_UNNAMED)
        }
        missing = [index for index in wanted if index not in key_of]
        if missing:
            raise KeyNotFoundError(f"No keys for the global indexes {missing[:8]} in partition {partition_id!r}.")
        return [key_of[index] for index in wanted]

    async def clear_keys(self, keys: Sequence[str], partition: str) -> None:
        """Remove rows; those that are gone already are no error."""
        await self.plane.clear(partition, keys)

    # -- rows by number
    async def get_meta(
        self,
        data_fields: list[str],
        batch_size: int,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
    ) -> BatchMeta:
        """Choose rows for a task (fetch), make new ones (insert), or list all (force_fetch).

        Raises:
            NotReadyError: too few rows until the deadline; in polling mode the answer is an empty BatchMeta instead.
        """
        if mode == "insert":
            return await self._insert(data_fields, batch_size, partition_id)
        if mode == "force_fetch":
            return await self._force_fetch(data_fields, partition_id)
        if mode != "fetch" or task_name is None:
            raise BatchError(
                f"mode must be fetch (with a task_name), insert or force_fetch; got {mode!r}, task {task_name!r}."
            )
        try:
            rows = await fetch(
                self.plane, self.settings, data_fields, batch_size, partition_id, task_name, sampling_config or {}
            )
        except PlaneTimeout as error:
            if self.settings.polling_mode:
                return BatchMeta.empty()
            raise NotReadyError(error.message) from error
        return await self._describe(rows, data_fields)

    async def _insert(self, fields: Sequence[str], count: int, partition: str) -> BatchMeta:
        keys = [f"{_UNNAMED}{os.urandom(8).hex()}-{i}" for i in range(count)]
        rows = await self.plane.put(partition, keys, tags=[{}] * count)
        unknown = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": False}
        return _batch_meta(rows, {name: dict(unknown) for name in fields}, np.zeros(count, np.int8))

    async def _force_fetch(self, fields: Sequence[str], partition: str) -> BatchMeta:
        rows = await self.plane.list_rows(partition)
        status = await self.plane.production_status(partition, fields=fields)
        every: list[bool] = np.all(status.flags, axis=1).tolist()
        ready = dict(zip(status.keys, every, strict=True))
        flags = np.asarray([ready.get(key, False) for key in rows.keys], dtype=np.int8)
        complete = rows.select_rows(np.flatnonzero(flags))
        schema = schema_of(await read(self.plane, complete, fields)) if complete else {}
        known = {
            name: facts
            for name, facts in schema.items()
            if "per_sample_shapes" not in facts or len(complete) == len(rows)
        }
        return _batch_meta(rows, {name: known.get(name, {}) for name in fields}, flags)

    async def put(
        self,
        data: TensorDict,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: Parser | None = None,
    ) -> BatchMeta:
        """Store fields of the rows of `metadata`, or of new rows of `partition_id`; the tags of `metadata` are stored too.

        Raises:
            BatchError: neither `metadata` nor `partition_id`, or no rows.
            StorageKeyNotFoundError: a row of `metadata` was cleared meanwhile; nothing of its partition is stored.
        """
        if metadata is None:
            if partition_id is None:
                raise BatchError("put needs metadata, or the partition_id for new rows.")
            metadata = await self._insert([], int(data.batch_size[0]), partition_id)
        if not metadata.size:
            raise BatchError("put needs at least one row.")
        batch = to_batch(parsed(data, data_parser) if data_parser is not None else data)
        if len(batch) != metadata.size:
            raise BatchError(f"put needs one row per row of metadata: {metadata.size} rows, {len(batch)} in the data.")
        for partition, places in _by_partition(metadata).items():
            rows = await self._rows(metadata, partition, places)
            tags = [pack_tag(metadata.custom_meta[place]) for place in places]
            await self._store(rows, batch.select_rows(places), tags)
        return metadata.add_fields(data)

    async def set_custom_meta(self, metadata: BatchMeta) -> None:
        """Store the tags of rows."""
        for partition, places in _by_partition(metadata).items():
            rows = await self._rows(metadata, partition, places)
            await self._store(rows, None, [pack_tag(metadata.custom_meta[place]) for place in places])

    async def _store(self, rows: Rows, batch: BatchData | None, tags: Sequence[Tag]) -> None:
        try:
            await self.plane.get(rows, [])  # the same rows are still there, not others of their name
            await self.plane.put(rows.partition, rows.keys, batch, tags=tags, expect=[{}] * len(rows))
        except (ConflictError, MissingDataError) as error:
            raise StorageKeyNotFoundError(f"A row was cleared since its metadata was made: {error.message}") from error

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """The fields of the rows, in their order.

        Raises:
            StorageKeyNotFoundError: a row or column that is not there, or a row that was made anew.
        """
        if not metadata.size or not metadata.field_names:
            return TensorDict({}, batch_size=0)
        parts: list[Table] = []
        order: list[int] = []
        for partition, places in _by_partition(metadata).items():
            rows = await self._rows(metadata, partition, places)
            try:
                parts.append(await read(self.plane, rows, metadata.field_names))
            except MissingDataError as error:
                raise StorageKeyNotFoundError(error.message) from error
            order += places
        whole = parts[0] if len(parts) == 1 else Table.concat(parts)
        table = whole if order == sorted(order) else whole.select_rows(np.argsort(order).tolist())
        return await copying(table.nbytes, lambda: to_tensordict(table))

    async def clear_partition(self, partition_id: str) -> None:
        """Remove a partition, and what was decided about it."""
        self.settings.sampler.clear_cache(partition_id)
        await self.plane.clear(draws_of(partition_id))
        await self.plane.clear(partition_id)

    async def clear_samples(self, metadata: BatchMeta) -> None:
        """Remove rows; those that are gone, or were made anew, are left alone."""
        for partition, places in _by_partition(metadata).items():
            rows = await self._rows(metadata, partition, places)
            now = await self.plane.list_rows(partition)
            same = set(zip(now.keys, now.generations, strict=True))
            mine = zip(rows.keys, rows.generations, strict=True)
            await self.plane.clear(partition, [key for key, index in mine if (key, index) in same])

    # -- status
    async def get_consumption_status(
        self, task_name: str, partition_id: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Row numbers [N] and int8 [N]: 1 where the task has consumed the row; (None, None) for a partition without rows."""
        rows = await self.plane.list_rows(partition_id)
        flags = await self.plane.consumption_status(partition_id, task=task_name)
        return _status(rows, flags.keys, flags.flags) if rows else (None, None)

    async def get_production_status(
        self, data_fields: list[str], partition_id: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Row numbers [N] and int8 [N, F]: 1 where the row has the field; (None, None) if no row has one of them."""
        rows = await self.plane.list_rows(partition_id)
        if not rows or not data_fields:
            return None, None
        flags = await self.plane.production_status(partition_id, fields=data_fields)
        return _status(rows, flags.keys, flags.flags) if flags.flags.any(axis=0).all() else (None, None)

    async def check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Whether the task has consumed every row."""
        _, status = await self.get_consumption_status(task_name, partition_id)
        return status is not None and bool(status.numel()) and bool((status == 1).all())

    async def check_production_status(self, data_fields: list[str], partition_id: str) -> bool:
        """Whether every row has all fields."""
        _, status = await self.get_production_status(data_fields, partition_id)
        return status is not None and bool((status == 1).all())

    async def reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Let the rows be consumed again; False for a partition without rows."""
        if not await self.plane.list_rows(partition_id):
            return False
        await self.plane.reset_consumption(partition_id, task=task_name)
        await self.plane.clear(draws_of(partition_id))
        self.settings.sampler.clear_cache(partition_id)
        return True

    # -- inner
    async def _describe(self, rows: Rows, fields: Sequence[str]) -> BatchMeta:
        """Metadata of rows that have the fields; their shapes are read from the rows."""
        schema = schema_of(await read(self.plane, rows, fields)) if rows and fields else {}
        return _batch_meta(rows, schema, np.ones(len(rows), np.int8))

    async def _rows(self, metadata: BatchMeta, partition: str, places: Sequence[int]) -> Rows:
        """The rows at some places of the metadata; metadata that somebody built by hand has numbers alone."""
        indexes = [metadata.global_indexes[place] for place in places]
        known: list[Any] = [metadata.backend_meta[place].get(_KEY) for place in places]
        if None in known:
            listed = await self.plane.list_rows(partition)
            key_of = dict(zip(indexes_of(listed), listed.keys, strict=True))
            missing = [index for index in indexes if index not in key_of]
            if missing:
                raise StorageKeyNotFoundError(f"Partition {partition!r} has no rows with the numbers {missing[:8]}.")
            known = [key_of[index] for index in indexes]
        return Rows(partition=partition, keys=tuple(known), generations=tuple(index + FIRST for index in indexes))


def _key_list(keys: list[str] | str) -> list[str]:
    names = [keys] if isinstance(keys, str) else list(keys)
    if not names:
        raise BatchError("At least one key is needed; got an empty list.")
    return names


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


def _status(rows: Rows, keys: Sequence[str], flags: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and flags of the rows that both answers know."""
    index_of = dict(zip(rows.keys, indexes_of(rows), strict=True))
    known = [place for place, key in enumerate(keys) if key in index_of]
    indexes = torch.tensor([index_of[keys[place]] for place in known], dtype=torch.long)
    return indexes, torch.from_numpy(flags[known].astype(np.int8))
