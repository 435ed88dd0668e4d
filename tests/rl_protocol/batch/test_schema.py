"""BatchSchema: its checks and its error messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_protocol import (
    BatchData,
    BatchSchema,
    ColumnSpec,
    DistinctIds,
    LengthIsProduct,
    LengthIsRuns,
    LengthIsSum,
    ObjectColumn,
    SameLength,
    SchemaError,
    UnknownNameError,
    dense,
    pack_arrays,
    ragged,
)
from rl_protocol.batch.schema import AlignmentLaw
from rl_protocol.rl_columns import (
    IMAGE_COLUMNS,
    KEPT_COLUMNS,
    PROMPT_SCHEMA,
    ROUTED_COLUMNS,
    TEACHER_PROMPTS,
    TRAJECTORY_SCHEMA,
    prompt_partition,
)

SCHEMA = BatchSchema(
    (
        ColumnSpec(name="ids", kind="ragged", dtype="int32"),
        ColumnSpec(name="mask", kind="ragged", dtype="bool"),
        ColumnSpec(name="logp", kind="ragged", dtype="float32"),
        ColumnSpec(name="grid", kind="dense", dtype="float32", dims=(2, 3)),
        ColumnSpec(name="note", kind="object"),
    ),
    laws=(SameLength(("ids", "mask")), LengthIsSum("logp", "mask")),
)


def test_a_batch_that_keeps_the_contract_passes():
    SCHEMA.check(
        BatchData(
            {
                "ids": ragged([[1, 2], [3], []], "int32"),
                "mask": ragged([[1, 0], [1], []], "bool"),
                "logp": ragged([[0.5], [0.5], []], "float32"),
                "grid": dense(np.zeros((3, 2, 3), np.float32)),
                "note": ObjectColumn.from_values(["a", None, 1]),
            }
        )
    )
    SCHEMA.check(BatchData({}, 4))
    SCHEMA.check(BatchData({"logp": ragged([[0.5]], "float32")}))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (("ids", dense(np.zeros(1, np.int32))), r"'ids': expected ragged int32 with dims \[\], got dense int32"),
        (("ids", ragged([[1]], "int64")), r"'ids': expected ragged int32 .*, got ragged int64"),
        (("ids", ragged([[[1]]], "int32")), r"with dims \[\], got ragged int32 with dims \[1\]"),
        (("grid", dense(np.zeros((1, 3, 2), np.float32))), r"dims \[2, 3\], got dense float32 with dims \[3, 2\]"),
        (("grid", dense(np.zeros((1, 2, 3), np.uint16), "bfloat16")), "expected dense float32 .*, got dense bfloat16"),
        (("note", dense(np.zeros(1, np.int8))), "'note': expected object object .*, got dense int8"),
    ],
)
def test_kind_dtype_and_dims_are_checked(column: tuple[str, object], message: str):
    with pytest.raises(SchemaError, match=message):
        SCHEMA.check(BatchData(dict([column])))  # type: ignore[arg-type]


def test_laws_name_row_column_expected_and_got():
    with pytest.raises(SchemaError, match=r"^Row 1, column 'mask': expected length len\(ids\) = 2, got 1; 1 of 2 rows"):
        SCHEMA.check(BatchData({"ids": ragged([[1], [2, 3]], "int32"), "mask": ragged([[1], [1]], "bool")}))
    batch = BatchData(
        {"logp": ragged([[0.0], [], [0.0]], "float32"), "mask": ragged([[0, 1], [1], [1, 1]], "bool")},
    )
    with pytest.raises(
        SchemaError, match=r"^Row 1, column 'logp': expected length sum\(mask\) = 1, got 0; 2 of 3 rows"
    ):
        SCHEMA.check(batch)
    with pytest.raises(SchemaError, match=r"^Row 1 \('p/1/0'\), column 'logp'"):
        SCHEMA.check(batch, ["p/0/0", "p/1/0", "p/2/0"])


def test_laws_between_columns_that_cannot_have_them_are_refused():
    ids, grid = (
        ColumnSpec(name="ids", kind="ragged", dtype="int32"),
        ColumnSpec(name="grid", kind="dense", dtype="int8"),
    )
    with pytest.raises(SchemaError, match=r"SameLength.* is a law of ragged columns; 'grid' is dense"):
        BatchSchema([ids, grid], laws=[SameLength(("ids", "grid"))])
    with pytest.raises(UnknownNameError, match="'msk' is not in the schema"):
        BatchSchema([ids], laws=[LengthIsSum("ids", "msk")])


@pytest.mark.parametrize(
    "law",
    [
        SameLength(("a", "b")),
        LengthIsSum("a", "b"),
        LengthIsProduct("a", "b"),
        LengthIsRuns("a", "b"),
        DistinctIds("a", "b"),
    ],
)
def test_a_schema_checks_a_law_only_where_its_columns_are_present(law: AlignmentLaw):
    schema = BatchSchema([ColumnSpec(name=n, kind="ragged", dtype="int64", dims=(2,)) for n in "ab"], laws=[law])
    wrong = BatchData({"a": ragged([np.ones((1, 2), int)], "int64"), "b": ragged([np.full((3, 2), 2)], "int64")})
    with pytest.raises(SchemaError, match=r"^Row 0"):
        schema.check(wrong)
    for name in "ab":
        schema.check(wrong.select_fields([name]))


def test_packed_arrays_are_as_long_as_their_shapes_say():
    law = LengthIsProduct("images", "images.shapes")
    images = pack_arrays("images", [[np.zeros((2, 3, 1), np.uint8)] * 2, []], ndim=3)
    law.check(BatchData(images))
    longer = BatchData({**images, "images": ragged([np.zeros(12, np.uint8), np.zeros(1, np.uint8)], "uint8")})
    with pytest.raises(
        SchemaError, match=r"Row 1, column 'images': expected length sum\(prod\(images.shapes\)\) = 0, got 1"
    ):
        law.check(longer)


def test_runs_cover_exactly_the_elements_of_their_row():
    law = LengthIsRuns("ids", "versions")
    versions = ragged([np.array([[3, 2], [5, 1]]), np.zeros((0, 2), np.int64), np.array([[9, 4]])], "int64")
    law.check(BatchData({"ids": ragged([[1, 1, 1], [], [1] * 4], "int64"), "versions": versions}))
    shorter = BatchData({"ids": ragged([[1, 1, 1], [1], [1] * 3], "int64"), "versions": versions})
    with pytest.raises(
        SchemaError, match=r"Row 1, column 'ids': expected length sum\(versions\[:, 1\]\) = 0, got 1; 2 of 3 rows"
    ):
        law.check(shorter)


def test_the_ragged_dimension_is_checked():
    spec = ColumnSpec(name="position_ids", kind="ragged", dtype="int64", dims=(3,), ragged_dim=1)
    spec.check(ragged([np.zeros((3, 5), np.int64)], "int64", ragged_dim=1))
    with pytest.raises(
        SchemaError, match=r"expected ragged int64 with dims \[3\], ragged in dimension 1, got ragged int64"
    ):
        spec.check(ragged([np.zeros((5, 3), np.int64)], "int64"))


@given(st.lists(st.tuples(st.lists(st.booleans(), max_size=4), st.integers(0, 4)), max_size=6))
def test_length_is_sum_agrees_with_lists(rows: list[tuple[list[bool], int]]):
    batch = BatchData(
        {"mask": ragged([mask for mask, _ in rows], "bool"), "logp": ragged([[0.0] * n for _, n in rows], "float32")}
    )
    wrong = [i for i, (mask, n) in enumerate(rows) if n != sum(mask)]
    if wrong:
        with pytest.raises(SchemaError, match=f"^Row {wrong[0]}, .*; {len(wrong)} of {len(rows)} rows"):
            LengthIsSum("logp", "mask").check(batch)
    else:
        LengthIsSum("logp", "mask").check(batch)


def test_undeclared_columns_and_double_declarations_are_errors():
    with pytest.raises(UnknownNameError, match="'x' is not in the schema; it has ids, mask"):
        SCHEMA.check(BatchData({"x": dense([1])}))
    with pytest.raises(SchemaError, match="'a' is declared twice"):
        BatchSchema([ColumnSpec(name="a", kind="object"), ColumnSpec(name="a", kind="object")])
    with pytest.raises(SchemaError, match="Unknown element type 'int7'"):
        ColumnSpec(name="a", kind="dense", dtype="int7")
    assert "ids" in SCHEMA
    assert "x" not in SCHEMA
    assert SCHEMA["ids"].kind == "ragged"


def test_rl_schemas_say_who_writes_what():
    for schema in (PROMPT_SCHEMA, TRAJECTORY_SCHEMA):
        for spec in schema.columns.values():
            assert spec.writer
            assert spec.meaning
            optional = spec.name in (*IMAGE_COLUMNS, *KEPT_COLUMNS, *ROUTED_COLUMNS, TEACHER_PROMPTS)
            assert bool(spec.absence) == (spec.writer != "rollout" or optional)
    for law in TRAJECTORY_SCHEMA.laws:
        assert isinstance(law, SameLength | LengthIsRuns | LengthIsSum | LengthIsProduct | DistinctIds)
        assert not set(PROMPT_SCHEMA.columns) & set(TRAJECTORY_SCHEMA.columns)
    assert prompt_partition("train") == "train/prompts"


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"kind": "dens"}, "kind of column 'x' must be one of dense, ragged, object; got 'dens'"),
        ({"kind": "dense", "dims": (3, -1)}, r"dims of column 'x' must be integers >= 0; got \[3, -1\]"),
        ({"kind": "dense", "dims": (1.5,)}, r"dims of column 'x' must be integers >= 0; got \[1\.5\]"),
        ({"kind": "ragged", "dims": (3,), "ragged_dim": 2}, r"'x' with dims \[3\] must be in 0\.\.1; got 2"),
        (
            {"kind": "dense", "dims": (3,), "ragged_dim": 1},
            r"dense column 'x' with dims \[3\] must be in 0\.\.0; got 1",
        ),
    ],
)
def test_a_column_that_can_not_be_is_refused_where_it_is_declared(declared: dict[str, Any], message: str):
    with pytest.raises(SchemaError, match=message):
        ColumnSpec(name="x", dtype="int64", **declared)


def test_dims_may_be_a_list():
    ColumnSpec(name="x", kind="dense", dtype="float64", dims=[2]).check(dense(np.zeros((1, 2))))  # type: ignore[arg-type]
