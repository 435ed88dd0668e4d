"""Columns, compared with plain Python lists."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_protocol import BatchError, ObjectColumn, RaggedColumn, SchemaError, WireError, dense, ragged
from rl_protocol.batch.columns import ColumnType, check_offsets, concat_columns, offsets_from_lengths
from rl_protocol.wire.decode_columns import column_from_buffers

ROWS = st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5), max_size=8)
OBJECTS = st.lists(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    ),
    max_size=6,
)


def as_lists(column: RaggedColumn) -> list[list[int]]:
    return [row.tolist() for row in column.rows()]


def test_a_ragged_column_is_values_and_offsets():
    column = ragged([[5, 6], [], [7]], "int32")
    assert column.values.tolist() == [5, 6, 7]
    assert column.offsets.tolist() == [0, 2, 2, 3]
    assert (len(column), column.kind, column.dtype, column.dims) == (3, "ragged", "int32", ())
    assert column.lengths.tolist() == [2, 0, 1]
    assert column.nbytes == 3 * 4 + 4 * 8


def test_equal_lengths_stay_ragged():
    column = ragged([[1, 2], [3, 4]], "int64")
    assert column.kind == "ragged"
    assert column.take(np.array([1, 0])).kind == "ragged"
    assert concat_columns([column, column], "x").kind == "ragged"
    assert column.values.shape == (4,)


@pytest.mark.parametrize("rows", [[], [[]], [[], []]])
def test_no_rows_and_empty_rows_are_legal(rows: list[list[int]]):
    column = ragged(rows, "float32")
    assert as_lists(column) == rows
    assert as_lists(column.span(0, len(rows))) == rows
    assert as_lists(column.take(np.arange(len(rows)))) == rows
    assert column.padded().shape == (len(rows), 0)
    assert len(ObjectColumn.from_values([])) == 0
    assert len(dense(np.zeros((0, 3)))) == 0


@given(ROWS, st.data())
def test_ragged_take_and_span_do_what_lists_do(rows: list[list[int]], data: st.DataObject):
    column = ragged(rows, "int32")
    assert as_lists(column) == rows
    picks = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10)) if rows else []
    assert as_lists(column.take(np.array(picks, dtype=np.int64))) == [rows[i] for i in picks]
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    span = column.span(start, stop)
    assert as_lists(span) == rows[start:stop]
    assert not span.values.size or np.shares_memory(span.values, column.values)


@given(ROWS, st.integers(0, 3), st.integers(-5, 5))
def test_padded_does_what_lists_do(rows: list[list[int]], more: int, fill: int):
    width = max(map(len, rows), default=0) + more
    assert ragged(rows, "int64").padded(width, fill).tolist() == [r + [fill] * (width - len(r)) for r in rows]


def test_padded_keeps_dims_and_refuses_to_cut():
    column = ragged([[[1, 2]], [[3, 4], [5, 6]]], "int16")
    assert column.dims == (2,)
    assert column.padded().tolist() == [[[1, 2], [0, 0]], [[3, 4], [5, 6]]]
    with pytest.raises(BatchError, match="Row 1 has 2 elements, more than the width 1"):
        column.padded(1)


@given(OBJECTS, st.data())
def test_object_take_and_span_do_what_lists_do(values: list[object], data: st.DataObject):
    column = ObjectColumn.from_values(values)
    assert column.values() == values
    picks = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=8)) if values else []
    assert column.take(np.array(picks, dtype=np.int64)).values() == [values[i] for i in picks]
    start = data.draw(st.integers(0, len(values)))
    assert column.span(start, len(values)).values() == values[start:]


@given(st.lists(ROWS, min_size=1, max_size=4))
def test_concat_does_what_lists_do(parts: list[list[list[int]]]):
    together = concat_columns([ragged(p, "int32") for p in parts], "x")
    assert isinstance(together, RaggedColumn)
    assert as_lists(together) == [row for part in parts for row in part]


def test_dense_rows_with_dims():
    column = dense(np.arange(6, dtype=np.float32).reshape(3, 2))
    assert (len(column), column.kind, column.dtype, column.dims) == (3, "dense", "float32", (2,))
    assert column.row(1).tolist() == [2, 3]
    assert column.take(np.array([2, 2])).values.tolist() == [[4, 5], [4, 5]]
    assert np.shares_memory(column.span(1, 3).values, column.values)


def test_columns_refuse_writes():
    for buffer in (
        *dense([1.0, 2.0]).buffers,
        *ragged([[1], [2]], "int8").buffers,
        *ObjectColumn.from_values(["a"]).buffers,
        *ragged([[1], [2]], "int8").span(0, 1).buffers,
    ):
        with pytest.raises(ValueError, match="read-only"):
            buffer[0] = 1
    with pytest.raises(AttributeError):
        dense([1]).dtype = "int8"  # type: ignore[misc]


@pytest.mark.parametrize(
    "offsets", [[], [1, 3], [0, 2], [0, 2, 1, 3], [[0, 3]], [0, 4]], ids=["none", "start", "end", "falls", "2d", "past"]
)
def test_offsets_that_do_not_fit_are_refused(offsets: list[int]):
    with pytest.raises(SchemaError, match="end at 3"):
        RaggedColumn(np.zeros(3, np.int8), np.array(offsets, np.int64), "int8")


def test_offsets_from_lengths():
    assert offsets_from_lengths([2, 0, 1]).tolist() == [0, 2, 2, 3]
    assert offsets_from_lengths([]).tolist() == [0]
    assert check_offsets(np.array([0, 2], np.int32), 2).dtype == np.int64


def test_ragged_keeps_dims_of_empty_rows():
    assert ragged([np.zeros((0, 5))], "float32").dims == (5,)
    assert ragged([[], np.ones((2, 5))], "float32").dims == (5,)
    assert ragged([np.zeros((3, 0))], "float32").lengths.tolist() == [3]


def test_ragged_refuses_rows_that_do_not_fit():
    with pytest.raises(SchemaError, match=r"agree in all dimensions except 0; got \[\(2,\), \(1, 1\)\]"):
        ragged([[1, 2], [[3]]], "int32")
    with pytest.raises(SchemaError, match=r"Row 1 of a ragged int32 column .* float64"):
        ragged([[1], [1.5]], "int32")
    with pytest.raises(SchemaError, match="Row 0 of a ragged bfloat16 column"):
        ragged([[1.0]], "bfloat16")
    with pytest.raises(SchemaError, match="ragged float8_e5m2 column must be an array of its elements' bits in uint8"):
        ragged([[1, 2]], "float8_e5m2")  # not 1.0 and 2.0, whose bits are 60 and 64
    with pytest.raises(SchemaError, match=r"Row 0 of a ragged uint8 column: values -1\.\.300 do not fit"):
        ragged([[300, -1]], "uint8")
    with pytest.raises(SchemaError, match="Row 1 of a ragged int32 column must have one shape"):
        ragged([[[1, 2]], [[3], [4, 5]]], "int32")
    with pytest.raises(SchemaError, match="the scalar 3"):
        ragged([3], "int32")
    with pytest.raises(SchemaError, match="Row 0"):
        ragged([["a"]], "int32")
    with pytest.raises(SchemaError, match="Unknown element type 'int7'"):
        ragged([[1]], "int7")


def test_ragged_accepts_what_loses_nothing():
    assert ragged([[1, 0]], "bool").values.tolist() == [True, False]
    assert ragged([[True]], "int32").values.tolist() == [1]
    assert ragged([[1, 2]], "float32").values.tolist() == [1.0, 2.0]
    assert ragged([[255]], "uint8").values.tolist() == [255]
    assert ragged([np.array([16256], np.uint16)], "bfloat16").dtype == "bfloat16"


@given(st.lists(st.lists(st.integers(-(2**63), 2**64 - 1) | st.booleans() | st.floats(-9, 9), max_size=4), max_size=6))
@pytest.mark.parametrize("dtype", ["int64", "uint64", "int8", "float32", "float64", "bool"])
def test_lists_of_numbers_are_stored_as_arrays_of_them_are(dtype: str, rows: list[list[float]]):
    arrays = [np.asarray(row) for row in rows]
    try:
        want = ragged(arrays, dtype)
    except SchemaError as error:
        with pytest.raises(SchemaError, match=re.escape(str(error))):
            ragged(rows, dtype)
        return
    got = ragged(rows, dtype)
    assert (got.values.dtype, got.dims) == (want.values.dtype, want.dims)
    assert got.values.tolist() == want.values.tolist()
    assert got.offsets.tolist() == want.offsets.tolist()


def test_dense_refuses_what_it_can_not_store():
    with pytest.raises(SchemaError, match="row dimension"):
        dense(3)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="ObjectColumn"):
        dense(["a", "b"])
    with pytest.raises(SchemaError, match="can't be stored"):
        dense(np.zeros(2, ">f4"))
    with pytest.raises(SchemaError, match="dense column must have one shape"):
        dense([[1, 2], [3]])
    with pytest.raises(SchemaError, match="stored as uint16; got float32: numpy lacks bfloat16: give its bits"):
        dense(np.zeros(2, np.float32), "bfloat16")
    with pytest.raises(SchemaError, match=r"stored as float32; got float64: convert them with astype\('float32'\)"):
        dense([1.0], "float32")


def test_objects_that_msgpack_can_not_say_are_refused_by_row():
    with pytest.raises(SchemaError, match="Row 1 of an object column, a object"):
        ObjectColumn.from_values(["a", object()])
    with pytest.raises(SchemaError, match="Row 1 of an object column, a str"):
        ObjectColumn.from_values(["a", "\ud800"])
    with pytest.raises(SchemaError, match="Row 0 of an object column, a int"):
        ObjectColumn.from_values([2**70])
    # a JSON writer would fail on such a record later
    for number in (np.float32(1), np.int64(1), np.ones(2)):
        with pytest.raises(SchemaError, match=rf"Row 1 of an object column, a {type(number).__name__}"):
            ObjectColumn.from_values([{"n": 1}, number])


@pytest.mark.parametrize("raw", [b"\xa1\xff", b"\xc1", b"\x92\x01", b"\x91" * 5000, b"\x01\x02"])
def test_object_bytes_that_are_not_msgpack_are_a_wire_error_when_read(raw: bytes):
    column = ObjectColumn(np.frombuffer(raw, np.uint8), np.array([0, len(raw)]))
    with pytest.raises(WireError, match="Row 0"):
        column.row(0)


def test_reading_all_values_names_the_row_that_is_not_msgpack():
    good = ObjectColumn.from_values(["a", {"b": 1}])
    assert good.values() == ["a", {"b": 1}]
    raw = bytes(good.data) + b"\xc1"
    broken = ObjectColumn(np.frombuffer(raw, np.uint8), np.array([*good.offsets, len(raw)]))
    with pytest.raises(WireError, match="Row 2"):
        broken.values()


def test_row_numbers_past_the_end_are_an_error():
    with pytest.raises(IndexError):
        ragged([[1]], "int8").row(1)
    assert ragged([[1], [2, 3]], "int8").row(-1).tolist() == [2, 3]


def test_concat_of_columns_that_differ_names_the_column():
    with pytest.raises(BatchError, match="Column 'x' differs"):
        concat_columns([ragged([[1]], "int8"), ragged([[1]], "int16")], "x")
    with pytest.raises(BatchError, match="Column 'x' differs"):
        concat_columns([ragged([[1]], "int8"), dense(np.zeros(1, np.int8))], "x")


def test_column_from_buffers_checks_counts_kinds_and_sizes():
    empty = memoryview(b"")
    with pytest.raises(SchemaError, match=r"has 1 buffer\(s\); got 2"):
        column_from_buffers(ColumnType("dense", "int8"), 0, [empty, empty])
    with pytest.raises(SchemaError, match="Unknown column kind 'sparse'"):
        column_from_buffers(ColumnType("sparse", "int8"), 0, [empty, memoryview(bytes(8))])
    with pytest.raises(SchemaError, match="has 3 bytes; got 0"):
        column_from_buffers(ColumnType("dense", "int8", (3,)), 1, [empty])
    with pytest.raises(SchemaError, match="No int8 array can have shape"):
        column_from_buffers(ColumnType("dense", "int8", (2**62, 0, 2**62)), 1, [empty])
    with pytest.raises(
        SchemaError, match=r"Only ragged columns .* got dense int8 with dims \[3\], ragged in dimension 1"
    ):
        column_from_buffers(ColumnType("dense", "int8", (3,), 1), 0, [empty])
    with pytest.raises(SchemaError, match=r"dims \[3\] can be ragged in dimension 0\.\.1; got 2"):
        column_from_buffers(ColumnType("ragged", "int8", (3,), 2), 0, [empty, memoryview(bytes(8))])


# ---- rows
# ragged in a later dimension
POSITIONS = [np.arange(6).reshape(3, 2), np.zeros((3, 0), np.int64), np.arange(12).reshape(3, 4) * 10]
"""Position ids of a vision-language model, [3, L_i]: (time, height, width) of each token."""


def test_rows_may_be_ragged_in_their_last_dimension():
    column = ragged(POSITIONS, "int64", ragged_dim=1)
    assert (column.dims, column.ragged_dim, column.lengths.tolist()) == ((3,), 1, [2, 0, 4])
    assert column.values.shape == (6, 3)
    assert [row.tolist() for row in column.rows()] == [p.tolist() for p in POSITIONS]
    for part in (column.take(np.array([2, 0])), column.span(1, 3), concat_columns([column, column], "x")):
        assert isinstance(part, RaggedColumn)
        assert part.ragged_dim == 1
    assert [row.tolist() for row in column.take(np.array([2, 0])).rows()] == [
        POSITIONS[2].tolist(),
        POSITIONS[0].tolist(),
    ]


def test_padding_grows_the_ragged_dimension():
    padded = ragged(POSITIONS[:2], "int64", ragged_dim=1).padded(3, -1)
    assert padded.tolist() == [[[0, 1, -1], [2, 3, -1], [4, 5, -1]], [[-1, -1, -1]] * 3]


def test_the_ragged_dimension_is_part_of_the_type_of_a_column():
    first, last = (
        ragged([np.zeros((3, 3), np.int64)], "int64"),
        ragged([np.zeros((3, 3), np.int64)], "int64", ragged_dim=1),
    )
    with pytest.raises(BatchError, match=r"Column 'x' differs.*dims \[3\], ragged in dimension 1"):
        concat_columns([first, last], "x")
    with pytest.raises(SchemaError, match=r"Row 0 of shape \(2,\) has no dimension 1"):
        ragged([[1, 2]], "int64", ragged_dim=1)
    with pytest.raises(SchemaError, match="all dimensions except 1"):
        ragged([np.zeros((3, 2), np.int64), np.zeros((2, 2), np.int64)], "int64", ragged_dim=1)
