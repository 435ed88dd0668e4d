"""The torch bridge: shares memory; keeps ragged tensors and exact bits."""

from __future__ import annotations

import asyncio
import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rl_protocol import (
    BatchData,
    ObjectColumn,
    RaggedColumn,
    SchemaError,
    WeightTensor,
    dense,
    pack_arrays,
    ragged,
    unpack_arrays,
    wire,
)
from rl_protocol.batch.dtypes import STORAGE_DTYPES
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_protocol.torch import (
    TORCH_DTYPES,
    column_from_tensor,
    from_tensordict,
    from_weight,
    lent_weight,
    tensor_digest,
    tensor_from_column,
    to_array,
    to_tensor,
    to_tensordict,
    to_weight,
    torch_dtype_name,
)

pytestmark = pytest.mark.numeric


def sample(dtype: str, *shape: int) -> torch.Tensor:
    count = int(np.prod(shape))
    return torch.arange(count).remainder(5).to(torch.float32).reshape(shape).to(TORCH_DTYPES[dtype])


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def jagged(values: torch.Tensor, offsets: list[int], jagged_dim: int = 1) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets=torch.tensor(offsets), jagged_dim=jagged_dim)


def test_every_element_type_has_a_torch_type_of_its_size():
    assert set(TORCH_DTYPES) == set(STORAGE_DTYPES)
    for name, dtype in TORCH_DTYPES.items():
        assert dtype.itemsize == STORAGE_DTYPES[name].itemsize
        assert torch_dtype_name(dtype) == name
    with pytest.raises(SchemaError, match=r"torch\.complex64"):
        torch_dtype_name(torch.complex64)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_dense_tensors_share_memory_both_ways(dtype: str):
    tensor = sample(dtype, 3, 4)
    column = column_from_tensor(tensor)
    assert (column.kind, column.dtype, column.dims) == ("dense", dtype, (4,))
    back = tensor_from_column(column)  # type: ignore[arg-type]
    assert back.dtype == tensor.dtype
    assert back.data_ptr() == tensor.data_ptr()
    assert bits(back) == bits(tensor)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("offsets", [[0, 2, 2, 6], [0, 2, 4, 6]], ids=["ragged", "equal"])
def test_jagged_tensors_stay_jagged_and_share_memory(dtype: str, offsets: list[int]):
    values = sample(dtype, 6, 2)
    column = column_from_tensor(jagged(values, offsets))
    assert isinstance(column, RaggedColumn)
    assert (column.dtype, column.dims, column.offsets.tolist()) == (dtype, (2,), offsets)
    back = tensor_from_column(column)
    assert back.is_nested
    assert back.layout == torch.jagged
    assert back.values().data_ptr() == values.data_ptr()
    assert bits(back.values()) == bits(values)
    assert [row.shape[0] for row in back.unbind()] == np.diff(offsets).tolist()


@pytest.mark.parametrize("rows", [[], [[]], [[], []]])
def test_empty_columns(rows: list[list[int]]):
    column = column_from_tensor(tensor_from_column(ragged(rows, "int64")))
    assert isinstance(column, RaggedColumn)
    assert column.lengths.tolist() == [0] * len(rows)
    assert tensor_from_column(dense(np.zeros((0, 3)))).shape == (0, 3)


@given(
    st.sampled_from(sorted(TORCH_DTYPES)),
    st.lists(st.integers(0, 3), max_size=5),
    st.lists(st.integers(0, 3), max_size=2),
    st.data(),
)
def test_any_jagged_tensor_comes_back_bit_equal(dtype: str, lengths: list[int], dims: list[int], data: st.DataObject):
    """From tensor to column, wire, column and tensor: dtype, ragged dimension, lengths and bits."""
    ragged_dim = data.draw(st.integers(0, len(dims)))
    shape = [*dims[:ragged_dim], sum(lengths), *dims[ragged_dim:]]
    tensor = jagged(sample(dtype, *shape), np.cumsum([0, *lengths]).tolist(), ragged_dim + 1)
    column = column_from_tensor(tensor)
    assert isinstance(column, RaggedColumn)
    assert (column.dtype, column.dims, column.ragged_dim) == (dtype, tuple(dims), ragged_dim)
    sent = wire.decode(b"".join(wire.encode(BatchData({"x": column}))))
    back = tensor_from_column(sent.ragged("x"))
    assert back.dtype == tensor.dtype
    assert back._ragged_idx == ragged_dim + 1  # type: ignore[attr-defined]
    assert back.shape[0] == len(lengths)
    for got, want in zip(back.unbind(), tensor.unbind(), strict=True):
        assert got.shape == want.shape
        assert bits(got) == bits(want)
    for array, want in zip(column.rows(), tensor.unbind(), strict=True):
        assert array.shape == tuple(want.shape)


@pytest.mark.parametrize("ragged_dim", [0, 1, 2])
def test_a_ragged_column_becomes_a_tensor_and_a_column_again_without_a_copy(ragged_dim: int):
    """For example the position ids [3, L_i] of a vision-language model."""
    shape = [3, 2]
    shape.insert(ragged_dim, 4)
    column = ragged([np.arange(24).reshape(shape)] * 2, "int64", ragged_dim)
    tensor = tensor_from_column(column)
    assert [list(row.shape) for row in tensor.unbind()] == [shape, shape]
    assert tensor.values().data_ptr() == column.values.ctypes.data
    again = from_tensordict(TensorDict({"x": tensor}, batch_size=[2])).ragged("x")
    assert again.ragged_dim == ragged_dim
    assert again.values.ctypes.data == column.values.ctypes.data
    assert again.offsets.ctypes.data == column.offsets.ctypes.data


def test_position_ids_made_by_torch_are_copied_once_into_rows():
    values = torch.arange(18).reshape(3, 6)
    column = column_from_tensor(jagged(values, [0, 2, 6], 2))
    assert isinstance(column, RaggedColumn)
    assert [row.tolist() for row in column.rows()] == [values[:, :2].tolist(), values[:, 2:].tolist()]
    assert column.values.ctypes.data != values.data_ptr()


def test_jagged_views_with_holes_are_copied_out():
    view = torch.nested.narrow(
        torch.arange(12).reshape(3, 4), 1, torch.tensor([0, 1, 0]), torch.tensor([2, 3, 4]), layout=torch.jagged
    )
    column = column_from_tensor(view)
    assert isinstance(column, RaggedColumn)
    assert [row.tolist() for row in column.rows()] == [[0, 1], [5, 6, 7], [8, 9, 10, 11]]
    empty = torch.nested.nested_tensor_from_jagged(
        torch.zeros(0), offsets=torch.tensor([0]), lengths=torch.zeros(0, dtype=torch.int64)
    )
    assert len(column_from_tensor(empty)) == 0


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors:UserWarning"
)  # the strided layout, which we refuse
def test_tensors_that_are_no_column_are_refused():
    with pytest.raises(SchemaError, match="row dimension"):
        column_from_tensor(torch.tensor(1.0))
    with pytest.raises(SchemaError, match="strided or jagged"):
        column_from_tensor(torch.eye(3).to_sparse())
    with pytest.raises(SchemaError, match="jagged layout"):
        column_from_tensor(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]))
    with pytest.raises(SchemaError, match="start at 0"):
        column_from_tensor(jagged(torch.zeros(6), [1, 2, 5]))


def test_gradients_and_strides_do_not_matter():
    tensor = torch.arange(6.0, requires_grad=True).reshape(2, 3)
    array, name = to_array(tensor.t())
    assert (array.tolist(), name) == ([[0, 3], [1, 4], [2, 5]], "float32")


def test_memory_that_may_not_be_written_is_copied():
    """Torch has no read-only tensors: `add_` on a read-only page would kill the process."""
    for owner in (np.arange(4.0), np.frombuffer(np.arange(4.0).tobytes())):
        owner.flags.writeable = False
        tensor = to_tensor(owner[1:], "float64")
        tensor += 10
        assert (tensor.tolist(), owner.tolist()) == ([11, 12, 13], [0, 1, 2, 3])


def test_a_view_that_refuses_writes_to_memory_that_takes_them_is_shared():
    """The columns of a batch are such views."""
    owner = np.arange(4.0)
    view = owner[1:]
    view.flags.writeable = False
    tensor = to_tensor(view, "float64")
    assert tensor.data_ptr() == view.ctypes.data
    del view, owner
    assert tensor.tolist() == [1, 2, 3]


def test_a_received_weight_may_be_written_to_and_a_lent_one_shares_its_memory():
    received = np.frombuffer(np.array([1.5, 2.5], np.float32).tobytes(), np.uint8)
    weight = WeightTensor("w", "float32", (2,), received)
    from_weight(weight).zero_()
    lent = lent_weight(weight)
    assert lent.data_ptr() == received.ctypes.data
    del received, weight
    assert lent.tolist() == [1.5, 2.5]


def test_tensors_of_the_plane_in_memory_are_the_readers_own():
    async def main() -> None:
        plane = MemoryDataPlane()
        meta = await plane.put("p", ["a"], BatchData({"x": dense(np.ones((1, 2)))}))
        to_tensordict(await plane.get(meta))["x"].zero_()
        assert (await plane.get(meta)).dense("x").values.tolist() == [[1, 1]]

    asyncio.run(main())


OBJECTS: list[list[object]] = [[], [None], ["a", "a"], [[1, 2], [3]], [[], []], [{"a": 1}, {"b": [1, {}]}], [b"x", 1]]


@pytest.mark.parametrize("objects", OBJECTS, ids=repr)
def test_tensordict_round_trip(objects: list[object]):
    rows = len(objects)
    batch = BatchData(
        {
            "grid": dense(np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)),
            "ids": ragged([[7] * 2 for _ in range(rows)], "int64"),
            "note": ObjectColumn.from_values(objects),
        }
    )
    data = to_tensordict(batch)
    assert list(data.batch_size) == [rows]
    assert data["ids"].is_nested
    again = from_tensordict(data)
    assert again.field_names == batch.field_names
    assert b"".join(wire.encode(again)) == b"".join(wire.encode(batch))
    for name in ("grid", "ids"):
        assert not rows or again[name].buffers[0].ctypes.data == batch[name].buffers[0].ctypes.data


def test_a_tensordict_of_a_trainer_is_shared():
    scores = torch.ones(2, 3, dtype=torch.bfloat16)
    data = TensorDict({"scores": scores, "note": NonTensorStack("a", "b")}, batch_size=[2])
    batch = from_tensordict(data)
    assert batch["scores"].dtype == "bfloat16"
    assert batch["scores"].buffers[0].ctypes.data == scores.data_ptr()
    assert batch.objects("note").values() == ["a", "b"]


def test_tensordicts_that_are_no_batch_are_refused():
    with pytest.raises(SchemaError, match=r"batch size \[N\]; got \[2, 3\]"):
        from_tensordict(TensorDict({"x": torch.zeros(2, 3)}, batch_size=[2, 3]))
    with pytest.raises(SchemaError, match=r"'t' of the TensorDict is a NonTensorData.*KVBatchMeta\.extra_info"):
        from_tensordict(TensorDict({"t": NonTensorData(0.7)}, batch_size=[2]))
    with pytest.raises(SchemaError, match=r"'images' of the TensorDict: Row 0 .*ndarray.*pack_arrays"):
        from_tensordict(TensorDict({"images": NonTensorStack(np.zeros((2, 2)), np.zeros((1, 2)))}, batch_size=[2]))
    inner = TensorDict({"x": torch.zeros(2)}, batch_size=[2])
    with pytest.raises(SchemaError, match="'inner' of the TensorDict is a TensorDict"):
        from_tensordict(TensorDict({"inner": inner}, batch_size=[2]))


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (5,), (2, 3)], ids=str)
def test_weights_round_trip_without_copying(dtype: str, shape: tuple[int, ...]):
    tensor = sample(dtype, *shape)
    weight = to_weight("w", tensor)
    assert (weight.name, weight.dtype, weight.shape, weight.nbytes) == ("w", dtype, shape, tensor.nbytes)
    assert weight.data.tobytes() == bits(tensor)
    back = from_weight(weight)
    assert (back.dtype, tuple(back.shape), bits(back)) == (tensor.dtype, shape, bits(tensor))
    if tensor.numel():
        assert weight.data.ctypes.data == tensor.data_ptr() == back.data_ptr()


def test_non_contiguous_weights_are_written_in_order():
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    for view in (tensor.t(), tensor[:, 1], tensor[:, ::2]):
        assert not view.is_contiguous()
        weight = to_weight("w", view)
        assert weight.shape == tuple(view.shape)
        assert torch.equal(from_weight(weight), view)


def test_weights_refuse_writes_and_bytes_that_do_not_fit():
    weight = to_weight("w", torch.ones(2))
    with pytest.raises(ValueError, match="read-only"):
        weight.data[0] = 1
    with pytest.raises(SchemaError, match=r"'w' of type bfloat16 and shape \(2,\) needs a flat uint8 array of 4 bytes"):
        WeightTensor("w", "bfloat16", (2,), np.zeros(2, np.uint8))
    with pytest.raises(SchemaError, match="Unknown element type"):
        WeightTensor("w", "int7", (2,), np.zeros(2, np.uint8))


def test_weights_at_odd_addresses_can_be_read():
    memory = np.zeros(9, np.uint8)
    memory[1:] = np.array([1.5, 2.5], np.float32).view(np.uint8)
    assert from_weight(WeightTensor("w", "float32", (2,), memory[1:])).tolist() == [1.5, 2.5]


def test_images_travel_in_a_tensordict():
    images = [[np.full((2, 3, 3), 7, np.uint8)], [np.zeros((1, 1, 3), np.uint8), np.ones((4, 2, 3), np.uint8)]]
    batch = BatchData(pack_arrays("images", images, ndim=3))
    again = from_tensordict(to_tensordict(batch))
    assert [[a.tolist() for a in row] for row in unpack_arrays(again, "images")] == [
        [a.tolist() for a in row] for row in images
    ]
    assert again["images"].buffers[0].ctypes.data == batch["images"].buffers[0].ctypes.data


def test_records_become_lists_and_dicts_of_plain_values():
    records = [{"role": "user", "parts": ["a", {"n": 1.5, "ok": True}]}, {"tool": None, "args": []}]
    data = TensorDict({"chat": NonTensorStack(*records), "text": ["a", "\u00fc"]}, batch_size=[2])
    batch = from_tensordict(data)
    assert batch.objects("chat").values() == records
    assert to_tensordict(batch)["text"] == ["a", "\u00fc"]


def test_a_digest_is_that_of_names_types_shapes_and_elements():
    """The hash of the described bytes, by hand; the order of the tensors does not matter."""
    weight = torch.tensor([[1.0, 2.0]])
    content = b"a float32 [1, 2]\n" + np.array([1.0, 2.0], "<f4").tobytes() + b"b bfloat16 []\n" + b"\x80\x3f"
    found = tensor_digest({"b": torch.tensor(1.0, dtype=torch.bfloat16), "a": weight})
    assert found == hashlib.sha256(content).hexdigest()
    for other in ({"a": weight.T}, {"a": weight.double()}, {"c": weight}, {"a": weight + 1e-6}):
        assert tensor_digest(other) != tensor_digest({"a": weight})
