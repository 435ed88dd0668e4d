"""with_schemas refuses a put that violates a schema, and stores nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from rl_protocol import (
    BatchData,
    BatchError,
    BatchSchema,
    ColumnSpec,
    KVBatchMeta,
    LengthIsSum,
    SchemaError,
    UnknownNameError,
    dense,
    ragged,
    with_schemas,
)
from rl_protocol.ports import DataPlane
from rl_protocol.testing.memory_data_plane import MemoryDataPlane

SCHEMA = BatchSchema(
    [
        ColumnSpec(name="mask", kind="ragged", dtype="bool"),
        ColumnSpec(name="logp", kind="ragged", dtype="float32"),
        ColumnSpec(name="score", kind="dense", dtype="float32"),
    ],
    laws=[LengthIsSum("logp", "mask")],
)
GOOD = BatchData(
    {
        "mask": ragged([[1, 0], [1]], "bool"),
        "logp": ragged([[-0.5], [-0.25]], "float32"),
        "score": dense(np.ones(2, np.float32)),
    }
)


def run(body: Callable[[DataPlane, MemoryDataPlane], Awaitable[None]]) -> None:
    async def main() -> None:
        plane = MemoryDataPlane()
        await body(with_schemas(plane, {"train": SCHEMA}), plane)

    asyncio.run(main())


def test_what_fits_goes_through_every_call() -> None:
    async def body(guarded: DataPlane, plane: MemoryDataPlane) -> None:
        meta = await guarded.put("train", ["a", "b"], GOOD, tags=[{"n": 1}, {"n": 2}])
        assert (await guarded.get(meta, ["score"])).dense("score").values.tolist() == [1, 1]
        assert (await guarded.wait_ready("train", count=1, fields=["logp"], where={"n": 2}, timeout_s=1)).keys == ("b",)
        assert (await guarded.list_rows("train")).keys == ("a", "b")
        await guarded.put("train", ["a"], tags=[{"n": 3}])
        assert (await guarded.stats()).rows == (await plane.stats()).rows == {"train": 2}
        assert guarded.traffic() == plane.traffic()
        assert await guarded.clear("train") == 2
        await guarded.close()

    run(body)


@pytest.mark.parametrize(
    ("column", "error", "message"),
    [
        ({"score": dense(np.ones(2))}, SchemaError, "'score': expected dense float32.*, got dense float64"),
        ({"score": dense(np.ones((2, 1), np.float32))}, SchemaError, r"expected dense .* dims \[\], got .* dims \[1\]"),
        ({"logp": ragged([[0.0], []], "float32")}, SchemaError, r"Row 1 \('b'\), column 'logp': .* = 1, got 0"),
        ({"scores": dense(np.ones(2, np.float32))}, UnknownNameError, "Column 'scores' is not in the schema"),
    ],
)
def test_what_does_not_fit_is_named_and_not_stored(
    column: dict[str, object], error: type[Exception], message: str
) -> None:
    async def body(guarded: DataPlane, plane: MemoryDataPlane) -> None:
        with pytest.raises(error, match=message):
            await guarded.put("train", ["a", "b"], BatchData({**GOOD.columns, **column}))  # type: ignore[dict-item]
        assert (await plane.stats()).rows == {}

    run(body)


def test_names_that_are_not_declared_are_errors() -> None:
    async def body(guarded: DataPlane, plane: MemoryDataPlane) -> None:
        await plane.put("trian", ["a"], GOOD.slice(0, 1))
        meta = KVBatchMeta(partition="trian", keys=("a",))
        for call in (
            guarded.put("trian", ["a"], GOOD.slice(0, 1)),
            guarded.get(meta, ["score"]),
            guarded.wait_ready("trian", count=1, timeout_s=1),
        ):
            with pytest.raises(UnknownNameError, match="Partition 'trian' is not declared; declared are train"):
                await call
        for call in (
            guarded.get(KVBatchMeta(partition="train", keys=("a",)), ["scores"]),
            guarded.wait_ready("train", count=1, fields=["scores"], timeout_s=1),
        ):
            with pytest.raises(UnknownNameError, match="'scores' is not in the schema"):
                await call

    run(body)


def test_one_row_per_key_is_still_the_planes_to_check() -> None:
    async def body(guarded: DataPlane, plane: MemoryDataPlane) -> None:
        with pytest.raises(BatchError, match="1 key, 2 rows"):
            await guarded.put("train", ["a"], GOOD)

    run(body)
