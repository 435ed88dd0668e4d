"""TensorDicts to batches and back: the only place where the compatible API meets tensors.

As in 0.1.11, tensors whose rows have dimensions of their own always come back jagged, also when all rows have one length; rows that are single
numbers come back as a tensor [N]. Strings and records come back as NonTensorStack; tensors and arrays inside them are kept, tuples become lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rl_protocol.batch import BatchData
from rl_protocol.columns import Column, DenseColumn, ObjectColumn, RaggedColumn
from rl_protocol.errors import BatchError, SchemaError
from rl_protocol.torch import TORCH_DTYPES, column_from_tensor, tensor_from_column
from rl_transferqueue.compat.metadata.batch_meta import Schema
from rl_transferqueue.compat.objects import pack, unpack


# ---------------------------------------------------------------------------------------------------------------- tables
def to_batch(fields: TensorDict) -> BatchData:
    """A TensorDict of batch size [N, ...] as columns.

    Raises:
        SchemaError: a field that can't be stored; names it.
        BatchError: no batch dimension, or a field of another length.
    """
    rows = _rows_in(fields)
    return BatchData({str(name): _column(str(name), fields.get(name), rows) for name in fields.keys()}, rows)  # noqa: SIM118


def _rows_in(fields: TensorDict) -> int:
    if not fields.batch_size:
        raise BatchError("Fields must have a batch size [N, ...]; got [].")
    return int(fields.batch_size[0])


def _column(name: str, value: Any, rows: int) -> Column:
    if not isinstance(value, torch.Tensor):
        return _objects(name, values_of(name, value, rows))
    if value.is_nested and value.layout != torch.jagged:
        value = _jagged(name, value.unbind())
    return _as_rows(column_from_tensor(value))


def values_of(name: str, value: Any, rows: int) -> list[Any]:
    """What each row has of a field that is no tensor.

    A list or array inside NonTensorData has one element per row, as in 0.1.11; any other value in it is that of every row.

    Raises:
        SchemaError: not such a field.
        BatchError: a list or array of another length.
    """
    if isinstance(value, NonTensorStack):
        return value.tolist()
    inner = value.data if isinstance(value, NonTensorData) else value
    if isinstance(inner, list | np.ndarray):
        if len(cast("list[Any]", inner)) != rows:
            raise BatchError(f"Field {name!r} has {len(cast('list[Any]', inner))} values, the batch has {rows} rows.")
        return list(cast("list[Any]", inner))
    if isinstance(value, NonTensorData):
        return [inner] * rows
    raise SchemaError(
        f"Field {name!r} is a {type(value).__name__}; tensors, lists, NonTensorData and NonTensorStack can be stored."
    )


def _objects(name: str, values: Sequence[object]) -> ObjectColumn:
    packed: list[object] = []
    for row, value in enumerate(values):
        try:
            packed.append(pack(value))
        except SchemaError as error:
            raise SchemaError(f"Field {name!r}, row {row}: {error.message}") from error
    return ObjectColumn.from_values(packed)


def _jagged(name: str, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    try:
        return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
    except RuntimeError as error:
        shapes = [tuple(row.shape) for row in rows][:4]
        raise SchemaError(
            f"Field {name!r}: rows may differ in one dimension; got shapes {shapes}, ... {error}"
        ) from error


def _as_rows(column: Column) -> Column:
    """Rows that have dimensions of their own as a ragged column, without copying: puts of different lengths can then be read together."""
    if not isinstance(column, DenseColumn) or not column.dims:
        return column
    rows, length, *dims = column.values.shape
    return RaggedColumn(column.values.reshape(rows * length, *dims), np.arange(rows + 1) * length, column.dtype)


def to_tensordict(batch: BatchData) -> TensorDict:
    """The columns as a TensorDict of batch size [N]. Tensors may be written to: memory of the plane is copied (rl_protocol.torch.to_tensor)."""
    return TensorDict({name: _field(column) for name, column in batch.columns.items()}, batch_size=[len(batch)])


def _field(column: Column) -> object:
    if isinstance(column, ObjectColumn):
        return NonTensorStack(*(unpack(value) for value in column.values()))
    return tensor_from_column(column)


def schema_of(batch: BatchData) -> dict[str, Schema]:
    """What a BatchMeta says of the columns."""
    return {name: _schema(column, batch) for name, column in batch.columns.items()}


def _schema(column: Column, batch: BatchData) -> Schema:
    if isinstance(column, ObjectColumn):
        return {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
    shapes = [tuple(column.row(i).shape) for i in range(len(batch))]
    nested = len(set(shapes)) > 1
    schema: Schema = {
        "dtype": TORCH_DTYPES[column.dtype],
        "shape": torch.Size(shapes[0] or (1,)) if shapes else None,
        "is_nested": nested,
        "is_non_tensor": False,
    }
    return schema | {"per_sample_shapes": shapes} if nested else schema


# ---------------------------------------------------------------------------------------------------------------- parsers
def parsed(fields: TensorDict, parser: Callable[[dict[str, Any]], object]) -> TensorDict:
    """The fields as a `data_parser` returns them, or has changed them in place; it runs here, in the process that puts.

    Raises:
        BatchError: it added or removed a field or a row.
    """
    plain: dict[str, Any] = {}
    rows = _rows_in(fields)
    for name in fields.keys():  # noqa: SIM118
        value = cast("Any", fields.get(name))
        plain[str(name)] = (
            value if isinstance(value, torch.Tensor) and not value.is_nested else _list_of(name, value, rows)
        )
    changed = parser(plain)
    plain = cast("dict[str, Any]", changed) if isinstance(changed, dict) else plain
    names = {str(name) for name in fields.keys()}  # noqa: SIM118
    if set(plain) != names or any(len(value) != rows for value in plain.values()):
        raise BatchError(
            f"The data_parser must keep the fields {sorted(names)} and {rows} rows in each; it left "
            f"{ {name: len(value) for name, value in plain.items()} }."
        )
    return TensorDict({name: _repacked(name, value) for name, value in plain.items()}, batch_size=[rows])


def _list_of(name: Any, value: Any, rows: int) -> list[Any]:
    return list(value.unbind()) if isinstance(value, torch.Tensor) else values_of(str(name), value, rows)


def _repacked(name: str, value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return value
    if value and all(isinstance(row, torch.Tensor) for row in value):
        return torch.stack(value) if not value[0].dim() else _jagged(name, value)
    return NonTensorStack(*value)
