"""Convert TensorDicts to batches and back.

As in 0.1.11, tensors whose rows have dimensions come back jagged, even if all rows have the same
length, and rows that are single numbers come back as a tensor [N]. Strings and records come back as
NonTensorStack: tensors and arrays inside them are kept, tuples become lists.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import Column, DenseColumn, ObjectColumn, RaggedColumn
from rl_protocol.errors import BatchError, SchemaError
from rl_protocol.torch import TORCH_DTYPES, column_from_tensor, tensor_from_column
from rl_transferqueue.compat.field_table import Field, Table
from rl_transferqueue.compat.metadata.batch_meta import Schema
from rl_transferqueue.compat.msgpack_values import pack, unpack

Parser: TypeAlias = Callable[[dict[str, Any]], object]
"""A `data_parser`: takes the fields by name, and changes them in place or returns others."""


def to_batch(fields: TensorDict) -> BatchData:
    """A TensorDict of batch size [N, ...] as columns.

    Raises:
        SchemaError: a field can't be stored; the message names it.
        BatchError: no batch dimension, or a field with another number of rows.
    """
    rows = rows_in(fields)
    return BatchData({str(name): _column(str(name), fields.get(name), rows) for name in fields.keys()}, rows)  # noqa: SIM118


def rows_in(fields: TensorDict) -> int:
    """N of a TensorDict of batch size [N, ...].

    Raises:
        BatchError: no batch dimension.
    """
    if not fields.batch_size:
        raise BatchError("Fields must have a batch size [N, ...]; got [].")
    return int(fields.batch_size[0])


def _column(name: str, value: Any, rows: int) -> Column:
    if not isinstance(value, torch.Tensor):
        return _objects(name, values_of(name, value, rows))
    if value.is_nested and value.layout != torch.jagged:
        value = packed_rows(value.unbind())
        if not value.is_nested or value.layout != torch.jagged:  # rows differ in several dimensions
            return _objects(name, value.unbind() if isinstance(value, torch.Tensor) else value.tolist())
    return _as_rows(column_from_tensor(value))


def values_of(name: str, value: Any, rows: int) -> list[Any]:
    """Values of a non-tensor field, one per row.

    As in 0.1.11, a list or array inside NonTensorData has one element per row, and any other value
    holds for every row.

    Raises:
        SchemaError: a type that can't be stored.
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
        except RecursionError as error:
            raise SchemaError(f"Field {name!r}, row {row}: a value nested this deeply can't be stored.") from error
    return ObjectColumn.from_values(packed)


def _as_rows(column: Column) -> Column:
    """A dense column with row dimensions as a ragged one, without a copy.

    Puts of different lengths can then be read together.
    """
    if not isinstance(column, DenseColumn) or not column.dims:
        return column
    rows, length, *dims = column.values.shape
    return RaggedColumn(column.values.reshape(rows * length, *dims), np.arange(rows + 1) * length, column.dtype)


def to_tensordict(table: Table) -> TensorDict:
    """The fields as a TensorDict of batch size [N], whose tensors are writable copies."""
    return TensorDict({name: _field(field) for name, field in table.fields.items()}, batch_size=[table.rows])


def _field(field: Field) -> object:
    if isinstance(field, tuple):
        return packed_rows([value for column in field for value in _values(column)])
    return tensor_from_column(field) if not isinstance(field, ObjectColumn) else packed_rows(_values(field))


def _values(column: Column) -> list[Any]:
    """Values of a column, one per row."""
    if isinstance(column, ObjectColumn):
        return [unpack(value) for value in column.values()]
    return list(tensor_from_column(column).unbind())


def packed_rows(values: Sequence[Any]) -> Any:
    """Pack one value per row into a field, as 0.1.11 does.

    Single numbers become a tensor [N]. Other tensors become jagged, or strided nested if they
    differ in several dimensions. Anything else becomes a NonTensorStack. Tensors of several dtypes
    get one that holds all of them.
    """
    if not values or not all(isinstance(value, torch.Tensor) for value in values):
        return NonTensorStack(*values)
    with contextlib.suppress(RuntimeError):  # torch's error for tensors that it can't nest
        rows = _of_one_dtype(cast("Sequence[torch.Tensor]", values))
        if not any(row.dim() for row in rows):
            return torch.stack(rows)
        with contextlib.suppress(RuntimeError):
            return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return torch.nested.as_nested_tensor(rows, layout=torch.strided)
    return NonTensorStack(*values)


def _of_one_dtype(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Rows of one dtype; float64 for integers beside floats, where torch's float32 loses digits."""
    kinds = {row.dtype for row in rows}
    common = functools.reduce(torch.promote_types, kinds)
    if common.is_floating_point and not all(kind.is_floating_point for kind in kinds):
        common = torch.float64
    return [row.to(common) for row in rows]


def schema_of(table: Table) -> dict[str, Schema]:
    """The field schema of a BatchMeta."""
    return {name: _schema(field, table.rows) for name, field in table.fields.items()}


def _schema(field: Field, rows: int) -> Schema:
    columns = field if isinstance(field, tuple) else (field,)
    tensors = [column for column in columns if not isinstance(column, ObjectColumn)]
    if len(tensors) < len(columns):
        return {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
    shapes = [tuple(column.row(i).shape) for column in tensors for i in range(len(column))]
    nested = len(set(shapes)) > 1
    schema: Schema = {
        "dtype": TORCH_DTYPES[tensors[0].dtype],
        "shape": torch.Size(shapes[0] or (1,)) if rows else None,
        "is_nested": nested,
        "is_non_tensor": False,
    }
    return schema | {"per_sample_shapes": shapes} if nested else schema


def parsed(fields: TensorDict, parser: Parser) -> TensorDict:
    """The fields that a `data_parser` returns, or changes in place, in this process.

    Raises:
        BatchError: the parser added or removed a field or a row.
    """
    plain: dict[str, Any] = {}
    rows = rows_in(fields)
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
    return TensorDict({name: _repacked(value) for name, value in plain.items()}, batch_size=[rows])


def _list_of(name: Any, value: Any, rows: int) -> list[Any]:
    return list(value.unbind()) if isinstance(value, torch.Tensor) else values_of(str(name), value, rows)


def _repacked(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return value
    if value and all(isinstance(row, torch.Tensor) for row in value):
        return packed_rows(value)
    return NonTensorStack(*value)
