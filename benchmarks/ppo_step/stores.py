"""The data planes that workers use, and the forms of a batch as a Ray object."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from peers.transferqueue import connect_peer, use_peer
from tensordict import TensorDict

from rl_protocol import BatchData, DenseColumn, KVBatchMeta, ObjectColumn, RaggedColumn
from rl_protocol.batch.columns import Column
from rl_protocol.torch import from_tensordict, to_tensordict
from rl_transferqueue import PlaneDescriptor, connect_blocking

PARTITION = "train"


class Store(Protocol):
    """A worker's client of a data plane."""

    def put(self, keys: Sequence[str], data: BatchData) -> None:
        """Add columns to rows."""
        ...

    def get(self, keys: Sequence[str], fields: Sequence[str]) -> BatchData:
        """Columns of rows, in this order."""
        ...

    def clear(self, keys: Sequence[str]) -> None:
        """Remove rows."""
        ...


class OurStore:
    """rl_transferqueue."""

    def __init__(self, descriptor: str) -> None:
        self._plane = connect_blocking(PlaneDescriptor.from_json(descriptor))

    def put(self, keys: Sequence[str], data: BatchData) -> None:
        self._plane.put(PARTITION, keys, data)

    def get(self, keys: Sequence[str], fields: Sequence[str]) -> BatchData:
        return self._plane.get(KVBatchMeta(partition=PARTITION, keys=tuple(keys)), fields)

    def clear(self, keys: Sequence[str]) -> None:
        self._plane.clear(PARTITION, keys)


class PeerStore:
    """TransferQueue 0.1.11; its TensorDicts share memory with our columns."""

    def __init__(self, info: dict[str, Any]) -> None:
        self._client = connect_peer(info, "worker")

    def put(self, keys: Sequence[str], data: BatchData) -> None:
        use_peer(self._client).kv_batch_put(keys=list(keys), partition_id=PARTITION, fields=to_tensordict(data))

    def get(self, keys: Sequence[str], fields: Sequence[str]) -> BatchData:
        names = list(fields)
        found = use_peer(self._client).kv_batch_get(keys=list(keys), partition_id=PARTITION, select_fields=names)
        return from_tensordict(found).select_fields(names)

    def clear(self, keys: Sequence[str]) -> None:
        use_peer(self._client).kv_clear(keys=list(keys), partition_id=PARTITION)


def as_declared(data: BatchData, kinds: Mapping[str, str]) -> BatchData:
    """Columns as declared: TransferQueue returns dense columns jagged. Nothing is copied."""
    return BatchData({name: _as(column, kinds[name]) for name, column in data.columns.items()}, len(data))


def _as(column: Column, kind: str) -> Column:
    if kind == "dense" and isinstance(column, RaggedColumn):
        rows = len(column)
        shape = (rows,) if column.values.shape == (rows,) else (rows, -1, *column.dims)
        return DenseColumn(column.values.reshape(shape), column.dtype)
    return column


class DataProto:
    """A batch pickled as verl's DataProto is: consolidated tensors through torch.save."""

    def __init__(self, batch: BatchData) -> None:
        self.batch = batch

    def __getstate__(self) -> tuple[bytes, dict[str, list[Any]], int]:
        tensors = {n: c for n, c in self.batch.columns.items() if not isinstance(c, ObjectColumn)}
        others = {n: c.values() for n, c in self.batch.columns.items() if isinstance(c, ObjectColumn)}
        buffer = io.BytesIO()
        if tensors:
            torch.save(to_tensordict(BatchData(tensors)).contiguous().consolidate(), buffer)
        return buffer.getvalue(), others, len(self.batch)

    def __setstate__(self, state: tuple[bytes, dict[str, list[Any]], int]) -> None:
        data, others, rows = state
        tensors: TensorDict | None = (
            torch.load(io.BytesIO(data), weights_only=False, map_location="cpu") if data else None
        )
        columns: dict[str, Column] = dict(from_tensordict(tensors).columns) if tensors is not None else {}
        columns |= {name: ObjectColumn.from_values(values) for name, values in others.items()}
        self.batch = BatchData(columns, rows)


class Buffers:
    """A batch whose buffers Ray keeps out of band, without a copy."""

    def __init__(self, batch: BatchData) -> None:
        self.batch = batch


CARRIERS: Mapping[str, type[DataProto] | type[Buffers]] = {"driver": DataProto, "driver-buffers": Buffers}
"""Name of a central plane -> form of its batches."""
