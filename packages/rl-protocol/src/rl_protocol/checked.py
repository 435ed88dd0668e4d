"""A data plane that holds its users to declared schemas, whatever plane is behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from rl_protocol.batch import BatchData
from rl_protocol.draft import Draft
from rl_protocol.errors import UnknownNameError
from rl_protocol.meta import KVBatchMeta
from rl_protocol.ports import DataPlane
from rl_protocol.schema import BatchSchema


def with_schemas(plane: DataPlane, schemas: Mapping[str, BatchSchema]) -> DataPlane:
    """The plane, with every put, get and wait checked against the schema of its partition before a byte moves.

    A put is checked whole: element types, shapes, and the laws between its columns. A partition or column that is not declared is an error,
    so that a misspelt name does not end as a wait for something that nobody writes. All other calls go straight to the plane.

    Args:
        plane: where the rows go.
        schemas: partition -> what its rows may hold.

    Raises (by the plane's `put`, `get` and `wait_ready`):
        SchemaError: a column breaks its declaration, or a row a law; names key, column, expected and got. Nothing was stored.
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
