"""with_schemas: wrap any data plane with checks against declared schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.kv_batch_meta import KVBatchMeta
from rl_protocol.batch.schema import BatchSchema
from rl_protocol.errors import UnknownNameError
from rl_protocol.ports import DataPlane
from rl_protocol.wire.draft import Draft


def with_schemas(plane: DataPlane, schemas: Mapping[str, BatchSchema]) -> DataPlane:
    """Wrap a plane so that every put, get and wait is checked against the schema of its partition.

    A put is checked before it is sent: element types, shapes, and the laws between its columns.
    Undeclared partitions and columns are errors, so a misspelled name fails instead of waiting
    forever. All other calls are forwarded unchanged.

    Args:
        plane: the plane to wrap.
        schemas: partition -> its schema.

    Raises (from `put`, `get` and `wait_ready`):
        SchemaError: a column or row breaks the schema; names key, column, expected and got. Nothing
            was stored.
        UnknownNameError: the partition or a column is not declared.
    """
    return cast(DataPlane, _Checked(plane, dict(schemas)))


class _Checked:
    def __init__(self, plane: DataPlane, schemas: Mapping[str, BatchSchema]) -> None:
        self._plane = plane
        self._schemas = schemas

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)

    async def put(
        self, partition: str, keys: Sequence[str], data: BatchData | Draft | None = None, **options: Any
    ) -> KVBatchMeta:
        schema = self._schema(partition)
        if data is not None:
            batch = data.batch() if isinstance(data, Draft) else data
            schema.check(batch, keys if len(keys) == len(data) else ())
        return await self._plane.put(partition, keys, data, **options)

    async def get(self, meta: KVBatchMeta, fields: Sequence[str] | None = None, **options: Any) -> BatchData:
        self._check_names(meta.partition, fields or ())
        return await self._plane.get(meta, fields, **options)

    async def wait_ready(self, partition: str, *, fields: Sequence[str] = (), **options: Any) -> KVBatchMeta:
        self._check_names(partition, fields)
        return await self._plane.wait_ready(partition, fields=fields, **options)

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
