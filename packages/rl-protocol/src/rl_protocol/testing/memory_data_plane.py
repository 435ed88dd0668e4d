"""In-memory data plane: the reference implementation of the DataPlane port, for one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import numpy as np

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import Column
from rl_protocol.batch.kv_batch_meta import KVBatchMeta, Scalar, Tag, check_tag, check_where
from rl_protocol.batch.schema import ColumnSpec
from rl_protocol.counted import counted
from rl_protocol.errors import BatchError, ConflictError, DuplicateKeyError, MissingDataError, PlaneTimeout
from rl_protocol.ports import PlaneStats, RowChanges, RowFlags, RowHosts, Traffic
from rl_protocol.support.host_identity import this_host
from rl_protocol.wire.draft import Draft, plan_columns


class _Row:
    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.version = 0
        self.columns: dict[str, Column] = {}
        self.tag: Tag = {}
        self.consumed: set[str] = set()

    def matches(self, fields: Sequence[str], where: Mapping[str, Scalar], task: str | None = None) -> bool:
        return (
            all(f in self.columns for f in fields)
            and all(k in self.tag and self.tag[k] == v for k, v in where.items())
            and task not in self.consumed
        )


class MemoryDataPlane:
    """A DataPlane made of dictionaries, for tests and as the oracle for other planes."""

    def __init__(self) -> None:
        self._partitions: dict[str, dict[str, _Row]] = {}
        self._removed: dict[str, dict[str, int]] = {}
        """partition -> key -> version at which the row was cleared."""
        self._version = 1
        self._generations = 0
        self._changed: asyncio.Condition | None = None
        self._written = 0
        self._read = 0

    async def put(
        self,
        partition: str,
        keys: Sequence[str],
        data: BatchData | Draft | None = None,
        *,
        tags: Sequence[Tag] | None = None,
        expect: Sequence[Tag | None] | None = None,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta:
        del timeout_s
        batch = data.batch() if isinstance(data, Draft) else data
        check_put(keys, batch, tags, expect)
        rows = self._partitions.setdefault(partition, {})
        for key, wanted in zip(keys, expect or (), strict=False):
            _check_expected(partition, key, rows.get(key), wanted)
        if isinstance(data, Draft):
            data.close()
        self._version += bool(keys)
        for i, key in enumerate(keys):
            if key not in rows:
                self._generations += 1
                rows[key] = _Row(self._generations)
                self._removed.get(partition, {}).pop(key, None)
            row = rows[key]
            row.version = self._version
            if batch is not None:
                row.columns.update(batch.select_rows([i]).columns)
            if tags is not None:
                row.tag.update(tags[i])
        self._written += batch.nbytes if batch is not None else 0
        await self._notify()
        return KVBatchMeta(
            partition=partition,
            keys=tuple(keys),
            tags=tuple(dict(t) for t in tags or ()),
            fields=batch.field_names if batch is not None else (),
            generations=tuple(rows[key].generation for key in keys),
        )

    async def alloc(
        self,
        columns: Iterable[ColumnSpec],
        rows: int,
        lengths: Mapping[str, Sequence[int]] | None = None,
        *,
        timeout_s: float = 60.0,
    ) -> Draft:
        del timeout_s
        header, offsets = plan_columns(columns, rows, lengths or {})
        return Draft(header, offsets, np.zeros(header.payload, np.uint8))

    async def get(
        self, meta: KVBatchMeta, fields: Sequence[str] | None = None, *, timeout_s: float = 60.0
    ) -> BatchData:
        del timeout_s
        names = meta.fields if fields is None else tuple(fields)
        rows = self._existing(meta)
        for key in meta.keys:
            for name in names:
                if name not in rows[key].columns:
                    raise MissingDataError(
                        f"Row {key!r} of partition {meta.partition!r} has no column {name!r}; it has {sorted(rows[key].columns)}."
                    )
        parts = [BatchData({name: rows[key].columns[name] for name in names}, 1) for key in meta.keys]
        # concat returns a single part unchanged, but readers must not share memory with the plane
        out = BatchData.concat(parts).select_rows(np.arange(len(parts))) if parts else BatchData({}, 0)
        self._read += out.nbytes
        return out

    async def wait_ready(
        self,
        partition: str,
        *,
        count: int,
        fields: Sequence[str] = (),
        where: Mapping[str, Scalar] | None = None,
        task: str | None = None,
        timeout_s: float,
    ) -> KVBatchMeta:

        wanted = check_where(where or {})

        def ready() -> list[str]:
            rows = self._partitions.get(partition, {})
            return [k for k, r in rows.items() if r.matches(fields, wanted, task)]

        try:
            changed = self._condition()
            async with asyncio.timeout(timeout_s), changed:
                await changed.wait_for(lambda: len(ready()) >= count)
                chosen = ready()[:count]
                if task is not None:
                    for key in chosen:
                        self._partitions[partition][key].consumed.add(task)
        except TimeoutError:
            raise PlaneTimeout(
                f"Only {len(ready())} of {count} rows of partition {partition!r} were ready (fields {list(fields)}, where {dict(where or {})}) "
                f"within {timeout_s} s; raise the deadline or check the stage that writes them."
            ) from None
        return self._describe(partition, chosen)

    async def claim(self, partition: str, keys: Sequence[str], *, task: str, timeout_s: float = 60.0) -> KVBatchMeta:
        del timeout_s
        check_put(keys, None, None)
        rows = self._existing(KVBatchMeta(partition=partition, keys=tuple(keys)))
        for key in keys:
            if task in rows[key].consumed:
                raise ConflictError(f"Row {key!r} of partition {partition!r} is already consumed by task {task!r}.")
        for key in keys:
            rows[key].consumed.add(task)
        return self._describe(partition, keys)

    async def list_rows(
        self,
        partition: str,
        *,
        where: Mapping[str, Scalar] | None = None,
        fields: Sequence[str] = (),
        task: str | None = None,
        keys: Sequence[str] | None = None,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta:
        del timeout_s
        rows = self._partitions.get(partition, {})
        if keys is not None:
            self._existing(KVBatchMeta(partition=partition, keys=tuple(keys)))
        chosen = rows if keys is None else keys
        return self._describe(partition, [k for k in chosen if rows[k].matches(fields, check_where(where or {}), task)])

    async def watch(
        self, partition: str, *, since: int = 0, where: Mapping[str, Scalar] | None = None, timeout_s: float
    ) -> RowChanges:

        def changes() -> RowChanges:
            rows = self._partitions.get(partition, {})
            changed = sorted((k for k, r in rows.items() if r.version > since), key=lambda k: rows[k].version)
            shown = [key for key in changed if rows[key].matches((), check_where(where or {}))]
            gone = [key for key, version in self._removed.get(partition, {}).items() if version > since]
            return RowChanges(
                rows=self._describe(partition, shown),
                removed=() if since == 0 else (*gone, *(key for key in changed if key not in shown)),
                version=max(
                    [since, 1, *(rows[k].version for k in changed), *self._removed.get(partition, {}).values()]
                ),
                reset=since == 0,
            )

        changed = self._condition()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(timeout_s, 0.001)), changed:
                await changed.wait_for(lambda: changes().version > since or since == 0)
        return changes()

    async def consumption_status(self, partition: str, *, task: str, timeout_s: float = 60.0) -> RowFlags:
        del timeout_s
        rows = self._partitions.get(partition, {})
        return RowFlags(keys=tuple(rows), flags=np.array([task in row.consumed for row in rows.values()], np.bool_))

    async def production_status(self, partition: str, *, fields: Sequence[str], timeout_s: float = 60.0) -> RowFlags:
        del timeout_s
        rows = self._partitions.get(partition, {})
        flags = [[name in row.columns for name in fields] for row in rows.values()]
        return RowFlags(keys=tuple(rows), flags=np.array(flags, np.bool_).reshape(len(rows), len(fields)))

    async def row_hosts(self, partition: str, keys: Sequence[str], *, timeout_s: float = 60.0) -> RowHosts:
        del timeout_s
        rows = self._existing(KVBatchMeta(partition=partition, keys=tuple(keys)))
        nbytes = [[sum(column.nbytes for column in rows[key].columns.values())] for key in keys]
        return RowHosts(hosts=(this_host(),), nbytes=np.array(nbytes, np.int64).reshape(len(nbytes), 1))

    async def reset_consumption(
        self,
        partition: str,
        *,
        task: str | None = None,
        keys: Sequence[str] | None = None,
        timeout_s: float = 60.0,
    ) -> int:
        del timeout_s
        rows = self._partitions.get(partition, {})
        reset = 0
        for key in rows if keys is None else dict.fromkeys(keys):
            consumed = rows[key].consumed if key in rows else set[str]()
            before = set(consumed)
            consumed.difference_update(before if task is None else {task})
            reset += consumed != before
        await self._notify()
        return reset

    async def clear(self, partition: str, keys: Sequence[str] | None = None, *, timeout_s: float = 60.0) -> int:
        del timeout_s
        rows = self._partitions.get(partition, {})
        gone = [key for key in (list(rows) if keys is None else dict.fromkeys(keys)) if rows.pop(key, None) is not None]
        if gone:
            self._version += 1
            self._removed.setdefault(partition, {}).update(dict.fromkeys(gone, self._version))
            await self._notify()
        return len(gone)

    async def unload(self, partition: str, keys: Sequence[str], *, timeout_s: float = 60.0) -> None:
        del partition, keys, timeout_s  # there is no disk

    async def stats(self, *, timeout_s: float = 60.0) -> PlaneStats:
        del timeout_s
        used = sum(
            c.nbytes for rows in self._partitions.values() for row in rows.values() for c in row.columns.values()
        )
        return PlaneStats(
            rows={name: len(rows) for name, rows in self._partitions.items()},
            bytes_used=used,
            bytes_capacity=0,
            columns={
                name: tuple(dict.fromkeys(c for row in rows.values() for c in row.columns))
                for name, rows in self._partitions.items()
            },
            tasks={
                name: tuple(sorted({task for row in rows.values() for task in row.consumed}))
                for name, rows in self._partitions.items()
            },
        )

    def traffic(self) -> Traffic:
        return Traffic(data_written=self._written, data_read=self._read)

    async def close(self) -> None:
        """Nothing to release."""

    def _existing(self, meta: KVBatchMeta) -> dict[str, _Row]:
        rows = self._partitions.get(meta.partition, {})
        generations = meta.generations or (0,) * len(meta)
        missing = [
            key
            for key, generation in zip(meta.keys, generations, strict=True)
            if key not in rows or generation not in (0, rows[key].generation)
        ]
        if missing:
            raise MissingDataError(
                f"{counted(len(missing), 'row')} not in partition {meta.partition!r}, the first is {missing[0]!r}.",
                keys=missing,
            )
        return rows

    async def _notify(self) -> None:
        changed = self._condition()
        async with changed:
            changed.notify_all()

    def _condition(self) -> asyncio.Condition:
        if self._changed is None:
            self._changed = asyncio.Condition()
        return self._changed

    def _describe(self, partition: str, keys: Sequence[str]) -> KVBatchMeta:
        rows = [self._partitions[partition][key] for key in keys]
        shared = [name for name in (rows[0].columns if rows else ()) if all(name in row.columns for row in rows)]
        return KVBatchMeta(
            partition=partition,
            keys=tuple(keys),
            tags=tuple(dict(row.tag) for row in rows),
            fields=tuple(shared),
            generations=tuple(row.generation for row in rows),
        )


def _check_expected(partition: str, key: str, row: _Row | None, wanted: Tag | None) -> None:
    if not (row is None if wanted is None else row is not None and row.matches((), wanted)):
        raise ConflictError(
            f"Row {key!r} of partition {partition!r} was expected to {'be absent' if wanted is None else f'have the tags {wanted}'}; "
            f"it has {row.tag if row is not None else 'no tags, it is not there'}."
        )


def check_put(
    keys: Sequence[str],
    data: BatchData | None,
    tags: Sequence[Tag] | None,
    expect: Sequence[Tag | None] | None = None,
) -> None:
    """Checks that every plane makes before a put.

    Raises:
        BatchError, DuplicateKeyError: see DataPlane.put.
    """
    if len(set(keys)) != len(keys):
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise DuplicateKeyError(f"Key {twice!r} occurs more than once in one put; keys must be unique.")
    for noun, size in (
        ("row", None if data is None else len(data)),
        ("tag", None if tags is None else len(tags)),
        ("expected tag", None if expect is None else len(expect)),
    ):
        if size is not None and size != len(keys):
            raise BatchError(f"A put needs one row per key: {counted(len(keys), 'key')}, {counted(size, noun)}.")
    for key, tag in zip(keys, tags or (), strict=False):
        for name, value in tag.items():
            check_tag(key, name, value)
    for wanted in expect or ():
        check_where(wanted or {})
