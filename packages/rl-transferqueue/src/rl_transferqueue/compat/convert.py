"""TensorDicts to batches and back: the only place where the compatible API meets tensors.

As in 0.1.11, tensors whose rows have dimensions of their own always come back jagged, also when all rows have one length; rows that are single
numbers come back as a tensor [N]. Strings and records come back as NonTensorStack; tensors and arrays inside them are kept, tuples become lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from rl_protocol.batch import BatchData
from rl_protocol.columns import Column, DenseColumn, ObjectColumn, RaggedColumn
from rl_protocol.dtypes import dtype_name, storage_dtype
from rl_protocol.errors import BatchError, SchemaError
from rl_protocol.torch import TORCH_DTYPES, column_from_tensor, tensor_from_column, to_array, to_tensor
from rl_transferqueue.compat.batch_meta import Schema

_TENSOR, _ARRAY = 1, 2
"""Kinds of msgpack extension inside object columns."""


# ---------------------------------------------------------------------------------------------------------------- tables
def to_batch(fields: TensorDict) -> BatchData:
    """A TensorDict of batch size [N] as columns.

    Raises:
        SchemaError: a field that can't be stored; names it.
        BatchError: not one batch dimension, or a field of another length.
    """
    if len(fields.batch_size) != 1:
        raise BatchError(f"Fields must have batch size [N]; got {list(fields.batch_size)}.")
    columns = {str(name): _column(str(name), fields.get(name)) for name in fields.keys()}  # noqa: SIM118
    return BatchData(columns, int(fields.batch_size[0]))


def _column(name: str, value: Any) -> Column:
    if isinstance(value, torch.Tensor):
        if value.is_nested and value.layout != torch.jagged:
            value = _jagged(name, value.unbind())
        return _as_rows(column_from_tensor(value))
    if isinstance(value, NonTensorStack | list):
        rows = value.tolist() if isinstance(value, NonTensorStack) else cast("list[object]", value)
        return _objects(name, rows)
    raise SchemaError(f"Field {name!r} is a {type(value).__name__}; tensors, lists and NonTensorStack can be stored.")


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
        return NonTensorStack(*(_unpack(value) for value in column.values()))
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


# ---------------------------------------------------------------------------------------------------------------- objects
def _objects(name: str, values: Sequence[object]) -> ObjectColumn:
    try:
        return ObjectColumn.from_values(_pack(value) for value in values)
    except SchemaError as error:
        raise SchemaError(
            f"Field {name!r}: {error} Store numbers, strings, bytes, tensors, arrays, and lists, tuples and dicts of them."
        ) from error


def _pack(value: Any) -> Any:
    """The value with tensors and arrays as msgpack extensions."""
    if isinstance(value, torch.Tensor):
        array, dtype = to_array(value)
        return _extension(_TENSOR, (dtype, tuple(value.shape), np.ascontiguousarray(array).tobytes()))
    if isinstance(value, np.ndarray):
        return _extension(_ARRAY, (dtype_name(value), value.shape, np.ascontiguousarray(value).tobytes()))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return [_pack(item) for item in cast("Sequence[Any]", value)]
    if isinstance(value, Mapping):
        return {key: _pack(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    return value


def _extension(kind: int, value: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(kind, msgspec.msgpack.encode(value))


def _unpack(value: Any) -> Any:
    if isinstance(value, msgspec.msgpack.Ext):
        return _unpack_extension(value.code, bytes(memoryview(value.data)))
    if isinstance(value, list):
        return [_unpack(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: _unpack(item) for key, item in cast("dict[Any, Any]", value).items()}
    return value


def _unpack_extension(kind: int, data: bytes) -> Any:
    dtype, shape, raw = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], bytearray])
    array = np.frombuffer(raw, storage_dtype(dtype)).reshape(shape)
    return to_tensor(array, dtype) if kind == _TENSOR else array


# ---------------------------------------------------------------------------------------------------------------- parsers
def parsed(fields: TensorDict, parser: Callable[[dict[str, Any]], object]) -> TensorDict:
    """The fields as a `data_parser` returns them, or has changed them in place; it runs here, in the process that puts.

    Raises:
        BatchError: it added or removed a field or a row.
    """
    plain: dict[str, Any] = {}
    for name in fields.keys():  # noqa: SIM118
        value = cast("Any", fields.get(name))
        plain[str(name)] = value if isinstance(value, torch.Tensor) and not value.is_nested else _list_of(value)
    changed = parser(plain)
    plain = cast("dict[str, Any]", changed) if isinstance(changed, dict) else plain
    rows, names = int(fields.batch_size[0]), {str(name) for name in fields.keys()}  # noqa: SIM118
    if set(plain) != names or any(len(value) != rows for value in plain.values()):
        raise BatchError(
            f"The data_parser must keep the fields {sorted(names)} and {rows} rows in each; it left "
            f"{ {name: len(value) for name, value in plain.items()} }."
        )
    return TensorDict({name: _repacked(name, value) for name, value in plain.items()}, batch_size=[rows])


def _list_of(value: Any) -> list[Any]:
    return list(value.unbind()) if isinstance(value, torch.Tensor) else value.tolist()


def _repacked(name: str, value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return value
    if value and all(isinstance(row, torch.Tensor) for row in value):
        return torch.stack(value) if not value[0].dim() else _jagged(name, value)
    return NonTensorStack(*value)
