"""A data plane that holds its users to declared schemas, whatever plane is behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl_protocol.batch import BatchData
from rl_protocol.errors import UnknownNameError
from rl_protocol.meta import KVBatchMeta, Scalar, Tag
from rl_protocol.ports import DataPlane, PlaneStats, Traffic
from rl_protocol.schema import BatchSchema


class CheckedPlane:
    """A DataPlane whose partitions and columns are declared: what does not fit is refused before a byte moves.

    A put is checked whole: element types, shapes, and the laws between its columns. A partition or column that is not declared is an error
    in every call, so that a misspelt name does not end as a wait for something that nobody writes.

    Args:
        plane: where the rows go.
        schemas: partition -> what its rows may hold.
    """

    def __init__(self, plane: DataPlane, schemas: Mapping[str, BatchSchema]) -> None:
        self._plane = plane
        self._schemas = dict(schemas)

    async def put(
        self,
        partition: str,
        keys: Sequence[str],
        data: BatchData | None = None,
        *,
        tags: Sequence[Tag] | None = None,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta:
        """See rl_protocol.ports.DataPlane.put.

        Raises:
            SchemaError: a column breaks its declaration, or a row a law; names key, column, expected and got. Nothing was stored.
            UnknownNameError: the partition or a column is not declared.
        """
        schema = self._schema(partition)
        if data is not None:
            schema.check(data, keys if len(keys) == len(data) else ())
        return await self._plane.put(partition, keys, data, tags=tags, timeout_s=timeout_s)

    async def get(
        self, meta: KVBatchMeta, fields: Sequence[str] | None = None, *, timeout_s: float = 60.0
    ) -> BatchData:
        """See rl_protocol.ports.DataPlane.get."""
        self._check_names(meta.partition, fields or ())
        return await self._plane.get(meta, fields, timeout_s=timeout_s)

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
        self._check_names(partition, fields)
        return await self._plane.wait_ready(
            partition, count=count, fields=fields, where=where, task=task, timeout_s=timeout_s
        )

    async def list_rows(
        self, partition: str, *, where: Mapping[str, Scalar] | None = None, timeout_s: float = 60.0
    ) -> KVBatchMeta:
        """See rl_protocol.ports.DataPlane.list_rows."""
        self._check_names(partition, ())
        return await self._plane.list_rows(partition, where=where, timeout_s=timeout_s)

    async def clear(self, partition: str, keys: Sequence[str] | None = None, *, timeout_s: float = 60.0) -> int:
        """See rl_protocol.ports.DataPlane.clear."""
        self._check_names(partition, ())
        return await self._plane.clear(partition, keys, timeout_s=timeout_s)

    async def stats(self, *, timeout_s: float = 60.0) -> PlaneStats:
        """See rl_protocol.ports.DataPlane.stats."""
        return await self._plane.stats(timeout_s=timeout_s)

    def traffic(self) -> Traffic:
        """See rl_protocol.ports.DataPlane.traffic."""
        return self._plane.traffic()

    async def close(self) -> None:
        """Close the plane behind it."""
        await self._plane.close()

    def _schema(self, partition: str) -> BatchSchema:
        schema = self._schemas.get(partition)
        if schema is None:
            raise UnknownNameError(
                f"Partition {partition!r} is not declared; declared are {', '.join(self._schemas) or 'none'}."
            )
        return schema

    def _check_names(self, partition: str, fields: Sequence[str]) -> None:
        schema = self._schema(partition)
        for name in fields:
            _ = schema[name]
