"""Convert batches and weights to and from torch tensors and TensorDict (extra `[torch]`).

tensordict is imported when a TensorDict is converted: workers convert tensors only, and its import
takes a twentieth of their start.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import AnyArray, Column, DenseColumn, ObjectColumn, RaggedColumn, offsets_from_lengths
from rl_protocol.batch.dtypes import storage_dtype
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import SchemaError

if TYPE_CHECKING:
    from tensordict import NonTensorStack, TensorDict

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
        "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2",
    )
}  # fmt: skip
"""Name of each element type -> torch dtype."""
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def torch_dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch element type.

    Raises:
        SchemaError: it has none here.
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        raise SchemaError(f"Tensors of {dtype} can't be stored; use one of {', '.join(TORCH_DTYPES)}.") from None


def to_array(tensor: torch.Tensor) -> tuple[AnyArray, str]:
    """A CPU tensor as a numpy array in storage dtype, sharing memory when contiguous, and its
    element type's name."""
    name = torch_dtype_name(tensor.dtype)
    store = storage_dtype(name)
    plain = tensor.detach().contiguous().cpu()
    if plain.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        plain = plain.view(torch.uint16 if store.itemsize == 2 else torch.uint8)
    return plain.numpy(), name


def tensor_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of the tensors: of each its name, element type, shape and elements, by name."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        elements, dtype = to_array(tensors[name])
        found.update(f"{name} {dtype} {list(elements.shape)}\n".encode())
        found.update(elements.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def to_tensor(array: AnyArray, dtype: str) -> torch.Tensor:
    """The array as a tensor of the named type.

    Writable memory is shared. Read-only memory, such as rows lent by a data plane or a bytes
    object, is copied: torch has no read-only tensors, and writing in place to such memory crashes
    the process.
    """
    return lent_tensor(array if _may_be_written(array) else array.copy(), dtype)


def lent_tensor(array: AnyArray, dtype: str) -> torch.Tensor:
    """The array as a tensor that always shares its memory. Never write to the tensor or hand it to
    other code."""
    writable = array
    if not array.flags.writeable:  # torch warns about arrays that refuse writes
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        writable = np.asarray(_Memory(interface, array)) if array.size else array.copy()
    tensor = torch.from_numpy(writable)
    want = TORCH_DTYPES[dtype]
    return tensor if tensor.dtype == want else tensor.view(want)


class _Memory:
    """Keeps an array alive while another array object views its memory."""

    def __init__(self, interface: dict[str, object], owner: AnyArray) -> None:
        self.__array_interface__ = interface
        self._owner = owner


def _may_be_written(array: AnyArray) -> bool:
    """Whether the array at the root of the view chain is writable. Views of it, such as columns,
    may still refuse writes."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return owner.flags.writeable


def column_from_tensor(tensor: torch.Tensor) -> Column:
    """A strided tensor [N, *dims] becomes a dense column, a jagged nested tensor a ragged one.

    Memory is shared if the rows are contiguous, as they are in a tensor that is ragged in dimension
    1 or was made by `tensor_from_column`. Other tensors are copied once.

    Raises:
        SchemaError: a nested tensor of another layout, or a scalar.
    """
    if not tensor.is_nested:
        if tensor.layout != torch.strided:
            raise SchemaError(f"Tensors must be strided or jagged; got the layout {tensor.layout}.")
        return DenseColumn(*to_array(tensor))
    if tensor.layout != torch.jagged:
        raise SchemaError(
            f"Nested tensors must have the jagged layout; got {tensor.layout}. Build them with torch.nested.nested_tensor_from_jagged."
        )
    nested = cast(Any, tensor)  # torch's stubs know no jagged tensors
    ragged_dim = int(nested._ragged_idx) - 1
    if nested.lengths() is not None and nested.shape[0]:  # a view with holes: rows are copied out
        rows = [to_array(row.movedim(ragged_dim, 0)) for row in nested.unbind()]
        offsets = offsets_from_lengths([row.shape[0] for row, _ in rows])
        return RaggedColumn(np.concatenate([row for row, _ in rows]), offsets, rows[0][1], ragged_dim)
    values, name = to_array(nested.values().movedim(ragged_dim, 0))
    offsets, _ = to_array(nested.offsets().to(torch.int64))
    return RaggedColumn(values, offsets, name, ragged_dim)


def tensor_from_column(column: DenseColumn | RaggedColumn) -> torch.Tensor:
    """The inverse of `column_from_tensor`. A ragged column always becomes a jagged nested tensor.

    Memory is shared as in `to_tensor`.
    """
    if isinstance(column, DenseColumn):
        return to_tensor(column.values, column.dtype)
    lengths = column.lengths
    return torch.nested.nested_tensor_from_jagged(
        to_tensor(column.values, column.dtype).movedim(0, column.ragged_dim),
        offsets=to_tensor(column.offsets, "int64"),
        jagged_dim=column.ragged_dim + 1,
        min_seqlen=int(lengths.min(initial=0)),
        max_seqlen=int(lengths.max(initial=0)),
    )


def to_tensordict(batch: BatchData) -> TensorDict:
    """The batch as a TensorDict of batch size [N]; object columns become NonTensorStack.

    Every tensor is writable: columns in the read-only memory of a data plane are copied (see
    `to_tensor`).
    """
    from tensordict import NonTensorStack, TensorDict

    items: dict[str, object] = {}
    for name, column in batch.columns.items():
        items[name] = (
            NonTensorStack(*column.values()) if isinstance(column, ObjectColumn) else tensor_from_column(column)
        )
    return TensorDict(items, batch_size=[len(batch)])


def from_tensordict(data: TensorDict) -> BatchData:
    """A TensorDict of batch size [N] as a batch; CPU tensors are shared, not copied.

    Raises:
        SchemaError: the batch size is not [N], or a value can't be stored.
    """
    from tensordict import NonTensorStack

    if len(data.batch_size) != 1:
        raise SchemaError(f"A TensorDict must have batch size [N]; got {list(data.batch_size)}.")
    columns: dict[str, Column] = {}
    for name in data.keys():  # noqa: SIM118 - iterating a TensorDict yields rows
        value = data.get(name)
        if isinstance(value, torch.Tensor):
            columns[str(name)] = column_from_tensor(value)
        elif isinstance(value, NonTensorStack):
            columns[str(name)] = _objects(str(name), value)
        else:
            raise SchemaError(
                f"Field {name!r} of the TensorDict is a {type(value).__name__}; tensors and NonTensorStack can be stored. Facts about the "
                "whole batch belong in KVBatchMeta.extra_info; arrays of different shapes are packed by rl_protocol.pack_arrays."
            )
    return BatchData(columns, int(data.batch_size[0]))


def _objects(name: str, value: NonTensorStack) -> ObjectColumn:
    try:
        return ObjectColumn.from_values(value.tolist())
    except SchemaError as error:
        raise SchemaError(
            f"Field {name!r} of the TensorDict: {error} Store strings, numbers, bytes, lists and dicts; arrays by rl_protocol.pack_arrays."
        ) from error


def to_weight(name: str, tensor: torch.Tensor) -> WeightTensor:
    """A tensor as a WeightTensor; contiguous CPU tensors are shared, not copied."""
    array, dtype = to_array(tensor)
    return WeightTensor(name, dtype, tuple(tensor.shape), array.reshape(-1).view(np.uint8))


def from_weight(weight: WeightTensor) -> torch.Tensor:
    """The inverse of `to_weight`; memory is shared as in `to_tensor`."""
    return to_tensor(_elements(weight), weight.dtype).reshape(weight.shape)


def lent_weight(weight: WeightTensor) -> torch.Tensor:
    """The weight as a tensor that shares its memory. Never write to it: other code may read the
    same memory."""
    return lent_tensor(_elements(weight), weight.dtype).reshape(weight.shape)


def _elements(weight: WeightTensor) -> AnyArray:
    return weight.data.view(storage_dtype(weight.dtype))
