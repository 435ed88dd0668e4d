"""pack_arrays and unpack_arrays: arrays of different shapes as two columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_protocol import BatchData, SchemaError, UnknownNameError, dense, pack_arrays, ragged, unpack_arrays, wire
from rl_protocol.batch.columns import AnyArray

IMAGES = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([1, 3])), max_size=3), max_size=4
)


def make(shapes: list[list[tuple[int, int, int]]]) -> list[list[AnyArray]]:
    rng = np.random.default_rng(0)
    return [[rng.integers(0, 256, shape, dtype=np.uint8) for shape in row] for row in shapes]


def as_lists(rows: list[list[AnyArray]]) -> list[list[tuple[Any, Any]]]:
    return [[(array.shape, array.tolist()) for array in row] for row in rows]


@given(IMAGES, st.data())
def test_images_survive_the_wire_and_the_selection_of_rows(
    shapes: list[list[tuple[int, int, int]]], data: st.DataObject
):
    rows = make(shapes)
    batch = BatchData(pack_arrays("images", rows, ndim=3))
    assert as_lists(unpack_arrays(wire.decode(b"".join(wire.encode(batch))), "images")) == as_lists(rows)
    order = data.draw(st.permutations(range(len(rows))))
    assert as_lists(unpack_arrays(batch.select_rows(order), "images")) == as_lists([rows[i] for i in order])


def test_the_two_columns_by_hand():
    image = np.arange(6, dtype=np.uint8).reshape(1, 2, 3)
    columns = pack_arrays("images", [[image, image[:, :1]], []], ndim=3)
    assert columns["images"].rows()[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert columns["images.shapes"].rows()[0].tolist() == [[1, 2, 3], [1, 1, 3]]
    assert (columns["images"].dtype, columns["images.shapes"].dims) == ("uint8", (3,))


def test_unpacking_copies_nothing():
    batch = BatchData(pack_arrays("images", make([[(2, 2, 3)], [(1, 4, 3), (2, 1, 1)]]), ndim=3))
    for row in unpack_arrays(batch, "images"):
        assert all(np.shares_memory(array, batch.ragged("images").values) for array in row)


def test_element_types_numpy_lacks():
    columns = pack_arrays("patches", [[np.zeros((2, 2), np.uint16)]], ndim=2, dtype="bfloat16")
    assert columns["patches"].dtype == "bfloat16"
    assert pack_arrays("empty", [[], []], ndim=2, dtype="float32")["empty"].dtype == "float32"


def test_arrays_that_do_not_belong_together_are_refused():
    with pytest.raises(
        SchemaError, match=r"Row 1 of 'x': expected arrays of 2 dimensions stored as uint8, got uint8 of shape \(3,\)"
    ):
        pack_arrays("x", [[np.zeros((1, 1), np.uint8)], [np.zeros(3, np.uint8)]], ndim=2)
    with pytest.raises(SchemaError, match="stored as uint8, got float64"):
        pack_arrays("x", [[np.zeros(1, np.uint8), np.zeros(1)]], ndim=1)


@pytest.mark.parametrize("shapes", [[[2, 2]], [[5, 1]], [[-1, -4]], [[2**62, 4]]])
def test_shapes_that_do_not_fit_are_refused(shapes: list[list[int]]):
    columns = {"x": ragged([[1, 2, 3]], "uint8"), "x.shapes": ragged([shapes], "int64")}
    with pytest.raises(SchemaError, match="Row 0 of 'x' has 3 elements"):
        unpack_arrays(BatchData(columns), "x")
    with pytest.raises(SchemaError, match=r"too few|its shapes say 2"):
        unpack_arrays(BatchData({**columns, "x.shapes": ragged([[[1, 2]]], "int64")}), "x")


def test_a_missing_column_is_named():
    with pytest.raises(UnknownNameError, match=r"'x\.shapes'"):
        unpack_arrays(BatchData({"x": ragged([[1]], "uint8")}), "x")
    with pytest.raises(SchemaError, match="'x' is dense"):
        unpack_arrays(BatchData({"x": dense([1])}), "x")
