"""BatchData, compared with plain Python lists."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_protocol import (
    BatchData,
    BatchError,
    DenseColumn,
    ObjectColumn,
    RaggedColumn,
    SchemaError,
    UnknownNameError,
    dense,
    ragged,
)

TABLES = st.lists(
    st.tuples(st.integers(-9, 9), st.lists(st.integers(0, 99), max_size=4), st.text(max_size=3) | st.integers(0, 5)),
    max_size=9,
)
Row = tuple[int, list[int], object]


def make(rows: list[Row]) -> BatchData:
    return BatchData(
        {
            "score": dense(np.array([r[0] for r in rows], np.int64)),
            "ids": ragged([r[1] for r in rows], "int32"),
            "note": ObjectColumn.from_values([r[2] for r in rows]),
        }
    )


def rows_of(batch: BatchData) -> list[Row]:
    ids = [row.tolist() for row in batch.ragged("ids").rows()]
    return list(zip(batch.dense("score").values.tolist(), ids, batch.objects("note").values(), strict=True))


@given(TABLES, st.data())
def test_selecting_rows_does_what_lists_do(rows: list[Row], data: st.DataObject):
    batch = make(rows)
    picks = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12)) if rows else []
    assert rows_of(batch.select_rows(picks)) == [rows[i] for i in picks]
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    assert rows_of(batch.slice(start, stop)) == rows[start:stop]
    order = data.draw(st.permutations(range(len(rows))))
    assert rows_of(batch.reorder(order)) == [rows[i] for i in order]
    times = data.draw(st.integers(1, 3))
    assert rows_of(batch.repeat(times)) == [row for row in rows for _ in range(times)]


@given(TABLES, st.integers(1, 12))
def test_chunks_sum_to_the_whole(rows: list[Row], parts: int):
    chunks = make(rows).chunk(parts)
    assert len(chunks) == parts
    assert {len(c) for c in chunks} <= {len(rows) // parts, len(rows) // parts + 1}
    assert [row for chunk in chunks for row in rows_of(chunk)] == rows
    assert rows_of(BatchData.concat(chunks)) == rows


@given(TABLES, st.integers(1, 5))
def test_balanced_parts_hold_every_row_once(rows: list[Row], parts: int):
    batch = make(rows)
    split = batch.split_balanced(batch.ragged("ids").lengths, parts)
    assert len(split) == parts
    assert sorted(map(repr, rows)) == sorted(repr(row) for part in split for row in rows_of(part))


@given(TABLES)
def test_union_puts_columns_back(rows: list[Row]):
    batch = make(rows)
    left, right = batch.select_fields(["note", "score"]), batch.select_fields(["ids", "score"])
    both = left.union(right)
    assert both.field_names == ("note", "score", "ids")
    assert rows_of(both) == rows


def test_slices_share_memory():
    batch = make([(1, [1, 2], "a"), (2, [3], "b"), (3, [], "c")])
    part = batch.slice(1, 3)
    assert np.shares_memory(part.dense("score").values, batch.dense("score").values)
    assert np.shares_memory(part.ragged("ids").values, batch.ragged("ids").values)
    assert np.shares_memory(part.objects("note").data, batch.objects("note").data)


def test_a_batch_without_columns_has_rows():
    batch = BatchData({}, 5)
    assert [len(c) for c in batch.chunk(3)] == [2, 2, 1]
    assert len(BatchData.concat(batch.chunk(3))) == 5
    assert len(batch.repeat(2)) == 10
    assert len(BatchData({})) == 0


@pytest.mark.parametrize(
    ("value", "got"), [([1, 2], "list"), (np.zeros(2), "ndarray"), (None, "NoneType"), (3.0, "float")]
)
def test_what_is_no_column_is_named(value, got):
    with pytest.raises(
        SchemaError, match=f"Column 'y' must be a DenseColumn, RaggedColumn or ObjectColumn, .* got {got}"
    ):
        BatchData({"x": dense([1.0, 2.0]), "y": value})


def test_reading():
    batch = make([(7, [1], "x")])
    assert batch.field_names == ("score", "ids", "note")
    assert "ids" in batch
    assert "nope" not in batch
    assert batch.nbytes == 8 + (4 + 16) + (2 + 16)
    assert repr(batch) == "BatchData(1 row; score: dense int64, ids: ragged int32, note: object object)"
    assert not batch.slice(0, 0)
    assert isinstance(batch["score"], DenseColumn)
    assert isinstance(batch["ids"], RaggedColumn)


def test_writing_raises():
    batch = make([(7, [1], "x")])
    with pytest.raises(TypeError):
        batch.columns["score"] = dense([1])  # type: ignore[index]
    with pytest.raises(TypeError):
        batch["score"] = dense([1])  # type: ignore[index]
    with pytest.raises(ValueError, match="read-only"):
        batch.dense("score").values[0] = 3
    with pytest.raises(ValueError, match="read-only"):
        batch.ragged("ids").row(0)[0] = 3
    with pytest.raises(AttributeError):
        batch.columns = {}  # type: ignore[misc]


def test_a_batch_does_not_follow_the_mapping_it_was_made_from():
    columns: dict[str, Any] = {"a": dense([1])}
    batch = BatchData(columns)
    columns["b"] = dense([2])
    assert batch.field_names == ("a",)


def check(match: str, kind: type[Exception], call: Any) -> None:
    with pytest.raises(kind, match=match):
        call()


def test_errors_name_things():
    batch = make([(1, [1, 2], "a"), (2, [3], "b")])
    check(
        "Column 'b' has 1 row, the batch has 2 .*'a'",
        SchemaError,
        lambda: BatchData({"a": dense([1, 2]), "b": dense([1])}),
    )
    check("Column 'a' has 2 rows, the batch has 3", SchemaError, lambda: BatchData({"a": dense([1, 2])}, 3))
    check("No column 'nope'.* score, ids, note", UnknownNameError, lambda: batch["nope"])
    check("No column 'nope'", UnknownNameError, lambda: batch.select_fields(["ids", "nope"]))
    check("'ids' is ragged, not dense", SchemaError, lambda: batch.dense("ids"))
    check("'score' is dense, not ragged", SchemaError, lambda: batch.ragged("score"))
    check("'score' is dense, not object", SchemaError, lambda: batch.objects("score"))
    check(r"Row 2 does not exist.*0\.\.1", UnknownNameError, lambda: batch.select_rows([0, 2]))
    check("Row -1 does not exist", UnknownNameError, lambda: batch.select_rows([-1]))
    check("Row 2 does not exist", UnknownNameError, lambda: batch.select_rows(range(1, 5)))
    check(r"Rows 1\.\.3", UnknownNameError, lambda: batch.slice(1, 3))
    check(r"Rows 1\.\.0", UnknownNameError, lambda: batch.slice(1, 0))
    check("dtype bool", BatchError, lambda: batch.select_rows(np.array([True, False])))
    check("each of the 2 rows exactly once; got 2 numbers, 1 distinct", BatchError, lambda: batch.reorder([0, 0]))
    check("exactly once; got 1", BatchError, lambda: batch.reorder([0]))
    check("equal row counts; got 2 and 1", BatchError, lambda: batch.union(BatchData({"z": dense([1])})))
    check("'score' is in both", BatchError, lambda: batch.union(BatchData({"score": dense([9, 9])})))
    check("times >= 1; got 0", BatchError, lambda: batch.repeat(0))
    check("at least one part; got none", BatchError, lambda: BatchData.concat([]))
    check(
        "Part 1 has columns .*select_fields first",
        BatchError,
        lambda: BatchData.concat([batch, batch.select_fields(["ids"])]),
    )
    check("at least 1 part; got 0", BatchError, lambda: batch.chunk(0))
    check("one weight per row: 2 rows, 1 weight", BatchError, lambda: batch.split_balanced([1], 2))


def test_union_tells_element_types_apart():
    ones: Mapping[str, Any] = {"x": dense(np.ones(2, np.int64))}
    with pytest.raises(BatchError, match="'x'"):
        BatchData(ones).union(BatchData({"x": dense(np.ones(2, np.float64))}))
    same_bits = BatchData({"x": dense(np.zeros(2, np.uint16))})
    with pytest.raises(BatchError, match="'x'"):
        same_bits.union(BatchData({"x": dense(np.zeros(2, np.uint16), "bfloat16")}))


def test_union_compares_bytes_so_nan_equals_itself():
    nan = BatchData({"x": dense([float("nan")])})
    assert np.isnan(nan.union(nan).dense("x").values[0])


def test_concat_takes_the_column_order_of_the_first_part():
    a = BatchData({"x": dense([1]), "y": dense([2])})
    b = BatchData({"y": dense([4]), "x": dense([3])})
    both = BatchData.concat([a, b])
    assert both.field_names == ("x", "y")
    assert both.dense("x").values.tolist() == [1, 3]


def mixed() -> BatchData:
    ids = ragged([np.zeros((3, 2), np.int64), np.ones((3, 1), np.int64)], "int64", ragged_dim=1)
    columns = {"x": dense(np.arange(4, dtype=np.uint16).reshape(2, 2), "bfloat16"), "ids": ids}
    return BatchData({**columns, "note": ObjectColumn.from_values(["a", {"b": 1}])})


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_batch_may_be_an_argument_of_ray_and_multiprocessing(protocol: int):
    batch = mixed()
    again = pickle.loads(pickle.dumps(batch.slice(1, 2), protocol))
    assert len(again) == 1
    # a union compares dtypes and bytes
    assert batch.slice(1, 2).union(again).field_names == ("x", "ids", "note")
    with pytest.raises(ValueError, match="read-only"):
        again.dense("x").values[0] = 1
    assert len(pickle.loads(pickle.dumps(BatchData({}, 3), protocol))) == 3


def test_pickling_need_not_copy_the_buffers():
    batch, buffers = mixed(), []
    frame = pickle.dumps(batch, 5, buffer_callback=buffers.append)
    again = pickle.loads(frame, buffers=buffers)
    for name in batch.field_names:
        assert all(np.shares_memory(a, b) for a, b in zip(batch[name].buffers, again[name].buffers, strict=True))


def test_pickling_a_slice_carries_its_rows_alone():
    whole = BatchData({"x": dense(np.zeros((1000, 100)))})
    assert len(pickle.dumps(whole.slice(3, 4))) < 2000


def test_a_batch_has_no_negative_number_of_rows():
    with pytest.raises(SchemaError, match="can't have -1 rows"):
        BatchData({}, -1)
