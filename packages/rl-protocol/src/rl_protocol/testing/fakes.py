"""In-memory data plane: the reference for the semantics of the DataPlane port. One process, one event loop, nothing shared."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rl_protocol.batch import BatchData
from rl_protocol.columns import Column
from rl_protocol.errors import BatchError, DuplicateKeyError, MissingDataError, PlaneTimeout
from rl_protocol.meta import KVBatchMeta, Scalar, Tag
from rl_protocol.ports import PlaneStats, Traffic


class _Row:
    def __init__(self) -> None:
        self.columns: dict[str, Column] = {}
        self.tag: Tag = {}
        self.consumed: set[str] = set()

    def matches(self, fields: Sequence[str], where: Mapping[str, Scalar]) -> bool:
        return all(f in self.columns for f in fields) and all(
            k in self.tag and self.tag[k] == v for k, v in where.items()
        )


class MemoryDataPlane:
    """A DataPlane held in dictionaries: for tests, and as the oracle other planes are compared with."""

    def __init__(self) -> None:
        self._partitions: dict[str, dict[str, _Row]] = {}
        self._changed: asyncio.Condition | None = None
        self._written = 0
        self._read = 0

    async def put(
        self,
        partition: str,
        keys: Sequence[str],
        data: BatchData | None = None,
        *,
        tags: Sequence[Tag] | None = None,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta:
        """See rl_protocol.ports.DataPlane.put."""
        del timeout_s
        check_put(keys, data, tags)
        rows = self._partitions.setdefault(partition, {})
        for i, key in enumerate(keys):
            row = rows.setdefault(key, _Row())
            if data is not None:
                part = data.select_rows([i])
                row.columns.update(part.columns)
            if tags is not None:
                row.tag.update(tags[i])
        self._written += data.nbytes if data is not None else 0
        changed = self._condition()
        async with changed:
            changed.notify_all()
        fields = data.field_names if data is not None else ()
        return KVBatchMeta(
            partition=partition, keys=tuple(keys), tags=tuple(dict(t) for t in tags or ()), fields=fields
        )

    async def get(
        self, meta: KVBatchMeta, fields: Sequence[str] | None = None, *, timeout_s: float = 60.0
    ) -> BatchData:
        """See rl_protocol.ports.DataPlane.get."""
        del timeout_s
        names = meta.fields if fields is None else tuple(fields)
        rows = self._partitions.get(meta.partition, {})
        missing = [key for key in meta.keys if key not in rows]
        if missing:
            raise MissingDataError(
                f"{len(missing)} rows are not in partition {meta.partition!r}, the first is {missing[0]!r}.",
                keys=missing,
            )
        for key in meta.keys:
            for name in names:
                if name not in rows[key].columns:
                    raise MissingDataError(
                        f"Row {key!r} of partition {meta.partition!r} has no column {name!r}; it has {sorted(rows[key].columns)}."
                    )
        parts = [BatchData({name: rows[key].columns[name] for name in names}, 1) for key in meta.keys]
        out = BatchData.concat(parts) if parts else BatchData({}, 0)
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
        """See rl_protocol.ports.DataPlane.wait_ready."""

        def ready() -> list[str]:
            rows = self._partitions.get(partition, {})
            return [
                k
                for k, r in rows.items()
                if r.matches(fields, where or {}) and (task is None or task not in r.consumed)
            ]

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
                f"within {timeout_s} s; raise the deadline or look at who should write them."
            ) from None
        return self._describe(partition, chosen)

    async def list_rows(
        self, partition: str, *, where: Mapping[str, Scalar] | None = None, timeout_s: float = 60.0
    ) -> KVBatchMeta:
        """See rl_protocol.ports.DataPlane.list_rows."""
        del timeout_s
        rows = self._partitions.get(partition, {})
        return self._describe(partition, [k for k, r in rows.items() if r.matches((), where or {})])

    async def clear(self, partition: str, keys: Sequence[str] | None = None, *, timeout_s: float = 60.0) -> int:
        """See rl_protocol.ports.DataPlane.clear."""
        del timeout_s
        rows = self._partitions.get(partition, {})
        gone = [rows.pop(key, None) for key in (list(rows) if keys is None else keys)]
        return sum(row is not None for row in gone)

    async def stats(self, *, timeout_s: float = 60.0) -> PlaneStats:
        """See rl_protocol.ports.DataPlane.stats."""
        del timeout_s
        used = sum(
            c.nbytes for rows in self._partitions.values() for row in rows.values() for c in row.columns.values()
        )
        return PlaneStats(
            rows={name: len(rows) for name, rows in self._partitions.items()}, bytes_used=used, bytes_capacity=0
        )

    def traffic(self) -> Traffic:
        """See rl_protocol.ports.DataPlane.traffic."""
        return Traffic(data_written=self._written, data_read=self._read)

    async def close(self) -> None:
        """Nothing to release."""

    def _condition(self) -> asyncio.Condition:
        if self._changed is None:
            self._changed = asyncio.Condition()
        return self._changed

    def _describe(self, partition: str, keys: Sequence[str]) -> KVBatchMeta:
        rows = [self._partitions[partition][key] for key in keys]
        shared = [name for name in (rows[0].columns if rows else ()) if all(name in row.columns for row in rows)]
        return KVBatchMeta(
            partition=partition, keys=tuple(keys), tags=tuple(dict(row.tag) for row in rows), fields=tuple(shared)
        )


def check_put(keys: Sequence[str], data: BatchData | None, tags: Sequence[Tag] | None) -> None:
    """The checks every plane makes before a put.

    Raises:
        BatchError, DuplicateKeyError: see DataPlane.put.
    """
    if len(set(keys)) != len(keys):
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise DuplicateKeyError(f"Key {twice!r} occurs more than once in one put; keys must be unique.")
    for what, size in (
        ("rows of data", None if data is None else len(data)),
        ("tags", None if tags is None else len(tags)),
    ):
        if size is not None and size != len(keys):
            raise BatchError(f"A put needs one row per key: {len(keys)} keys, {size} {what}.")
