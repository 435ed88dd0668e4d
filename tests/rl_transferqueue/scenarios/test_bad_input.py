"""Invalid calls raise a typed error, store nothing, and do not affect other clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
import pytest

from rl_protocol import (
    BatchData,
    BatchError,
    BatchSchema,
    ColumnSpec,
    DuplicateKeyError,
    KVBatchMeta,
    LengthIsSum,
    MissingDataError,
    PlaneTimeout,
    SchemaError,
    UnknownNameError,
    dense,
    ragged,
    with_schemas,
)
from rl_protocol.batch.columns import Column, RaggedColumn
from rl_protocol.ports import DataPlane
from rl_transferqueue import LocalPlane, connect

MIB = 1 << 20
SCHEMA = BatchSchema(
    [
        ColumnSpec(name="mask", kind="ragged", dtype="bool"),
        ColumnSpec(name="logp", kind="ragged", dtype="float32"),
        ColumnSpec(name="score", kind="dense", dtype="float32"),
        ColumnSpec(name="ids", kind="ragged", dtype="int64", dims=(3,), ragged_dim=1),
    ],
    laws=[LengthIsSum("logp", "mask")],
)
GOOD: Mapping[str, Column] = {
    "mask": ragged([[1, 0], [1]], "bool"),
    "logp": ragged([[-0.5], [-0.25]], "float32"),
    "score": dense(np.ones(2, np.float32)),
}
KEYS = ["new0", "new1"]
Call = Callable[[DataPlane], Awaitable[object]]


def put(keys: Any = KEYS, **columns: Column) -> Call:
    return lambda plane: plane.put("train", keys, BatchData({**GOOD, **columns}, 2))


def meta(*keys: str, partition: str = "train") -> KVBatchMeta:
    return KVBatchMeta(partition=partition, keys=keys)


MATRIX: dict[str, tuple[Call, type[Exception], str]] = {
    "wrong-element-type": (
        put(score=dense(np.ones(2))),
        SchemaError,
        r"'score': expected dense float32 .*, got dense float64",
    ),
    "wrong-shape": (
        put(score=dense(np.ones((2, 4), np.float32))),
        SchemaError,
        r"'score': expected .* dims \[\], got .* dims \[4\]",
    ),
    "dense-for-ragged": (put(logp=dense(np.ones(2, np.float32))), SchemaError, "'logp': expected ragged .*, got dense"),
    "wrong-ragged-dimension": (
        put(ids=ragged([np.zeros((2, 3), np.int64)] * 2, "int64")),
        SchemaError,
        "'ids': expected .* ragged in dimension 1, got ragged int64",
    ),
    "ragged-mismatch": (
        put(logp=ragged([[-0.5], [-0.25, -0.5]], "float32")),
        SchemaError,
        r"Row 1 \('new1'\), column 'logp': expected length sum\(mask\) = 1, got 2",
    ),
    "offsets-that-do-not-fit": (
        lambda plane: put(logp=RaggedColumn(np.zeros(2, np.float32), np.array([0, 1, 3]), "float32"))(plane),
        SchemaError,
        "end at 2",
    ),
    "undeclared-column": (put(scores=GOOD["score"]), UnknownNameError, "'scores' is not in the schema; it has mask"),
    "undeclared-partition": (
        lambda plane: plane.put("trian", KEYS, BatchData(GOOD)),
        UnknownNameError,
        "'trian' is not declared; declared are train, large",
    ),
    "key-twice": (put(["new0", "new0"]), DuplicateKeyError, "'new0' occurs more than once"),
    "fewer-keys-than-rows": (put(["new0"]), BatchError, "1 key, 2 rows"),
    "fewer-tags-than-keys": (
        lambda plane: plane.put("train", KEYS, BatchData(GOOD), tags=[{"n": 1}]),
        BatchError,
        "2 keys, 1 tag",
    ),
    "a-key-that-is-no-text": (put(["new0", "\ud800"]), BatchError, "strings"),
    "a-tag-that-is-a-list": (
        lambda plane: plane.put("train", KEYS, BatchData(GOOD), tags=[{"n": [1]}, {}]),  # type: ignore[list-item]
        BatchError,
        "Tag 'n' of row 'new0' must be a bool, int, float, str or None",
    ),
    "a-tag-too-large": (
        lambda plane: plane.put("train", KEYS, BatchData(GOOD), tags=[{"n": 1 << 70}, {}]),
        BatchError,
        "64 bits",
    ),
    "a-key-beyond-any-frame": (
        put(["new0", "k" * (65 * MIB)]),
        BatchError,
        r"control message takes \d+ bytes, the limit",
    ),
    "a-row-larger-than-a-unit": (
        lambda plane: plane.put("large", ["new0"], BatchData({"x": dense(np.zeros((1, 17 * MIB), np.uint8))})),
        BatchError,
        r"can never fit .*TransferQueueConfig\.capacity_mb",
    ),
    "get-unknown-key": (lambda plane: plane.get(meta("old", "ghost"), ["score"]), MissingDataError, "first is 'ghost'"),
    "get-unknown-partition": (
        lambda plane: plane.get(meta("old", partition="large"), ["x"]),
        MissingDataError,
        "not in partition 'large'.*the first is 'old'",
    ),
    "get-undeclared-field": (lambda plane: plane.get(meta("old"), ["scores"]), UnknownNameError, "'scores' is not in"),
    "get-field-nobody-wrote": (
        lambda plane: plane.get(meta("old"), ["ids"]),
        MissingDataError,
        r"'old' of partition 'train' has no column 'ids'; it has \['logp', 'mask', 'score'\]",
    ),
    "wait-for-undeclared-field": (
        lambda plane: plane.wait_ready("train", count=1, fields=["scroe"], timeout_s=60),
        UnknownNameError,
        "'scroe' is not in the schema",
    ),
    "wait-for-negative-count": (
        lambda plane: plane.wait_ready("train", count=-1, timeout_s=60),
        BatchError,
        "count >= 0; got -1",
    ),
    "watch-since-a-negative-version": (
        lambda plane: plane.watch("train", since=-1, timeout_s=60),
        BatchError,
        "since >= 0; got -1",
    ),
    "wait-for-more-than-there-is": (
        lambda plane: plane.wait_ready("train", count=9, fields=["score"], timeout_s=0.05),
        PlaneTimeout,
        "1 of 9 rows of partition 'train'",
    ),
}


@pytest.mark.parametrize("name", MATRIX)
def test_bad_input_is_named_and_has_no_side_effects(plane: LocalPlane, name: str) -> None:
    call, error, message = MATRIX[name]

    async def main() -> None:
        async with await connect(plane.descriptor) as client, await connect(plane.descriptor) as other:
            schemas = {
                "train": SCHEMA,
                "large": BatchSchema([ColumnSpec(name="x", kind="dense", dtype="uint8", dims=(17 * MIB,))]),
            }
            guarded = with_schemas(client, schemas)
            await guarded.put("train", ["old"], BatchData(GOOD).slice(0, 1), tags=[{"n": 1}])
            before, used = await other.list_rows("train"), (await other.stats()).bytes_used
            with pytest.raises(error, match=message):
                await call(guarded)
            assert await other.list_rows("train") == before
            assert (await other.stats()).bytes_used == used
            assert (await other.stats()).rows == {"train": 1}
            for one in (client, other):  # both clients still work
                rows = await one.put("fine", ["a"], BatchData({"x": dense([1.5])}))
                assert (await one.get(rows)).dense("x").values.tolist() == [1.5]
                assert await one.clear("fine") == 1

    asyncio.run(main())


NO_TEXT = "a\ud800"
ONE = BatchData({"x": dense(np.ones(1))})
NO_TEXT_IN: dict[str, Call] = {
    "partition": lambda plane: plane.put(NO_TEXT, ["k"], ONE),
    "key": lambda plane: plane.put("p", [NO_TEXT], ONE),
    "key-without-data": lambda plane: plane.put("p", [NO_TEXT]),
    "column": lambda plane: plane.put("p", ["k"], BatchData({NO_TEXT: dense(np.ones(1))})),
    "column-of-a-draft": lambda plane: plane.alloc([ColumnSpec(name=NO_TEXT, kind="dense", dtype="int8")], 1),
    "tag": lambda plane: plane.put("p", ["k"], tags=[{NO_TEXT: 1}]),
    "value-of-a-tag": lambda plane: plane.put("p", ["k"], tags=[{"n": NO_TEXT}]),
    "expected-tag": lambda plane: plane.put("p", ["k"], expect=[{"n": NO_TEXT}]),
    "field-of-a-get": lambda plane: plane.get(meta("old", partition="p"), [NO_TEXT]),
    "task": lambda plane: plane.wait_ready("p", count=1, task=NO_TEXT, timeout_s=60),
    "filter": lambda plane: plane.list_rows("p", where={NO_TEXT: 1}),
    "cleared-key": lambda plane: plane.clear("p", [NO_TEXT]),
}


@pytest.mark.parametrize("where", NO_TEXT_IN)
def test_text_that_utf8_can_not_encode_is_refused_at_the_call(plane: LocalPlane, where: str) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            await client.put("p", ["old"], ONE)
            before = await client.stats()
            with pytest.raises(BatchError, match="that UTF-8 can encode"):
                await NO_TEXT_IN[where](client)
            after = await client.stats()
            assert (after.rows, after.columns, after.bytes_used) == (before.rows, before.columns, before.bytes_used)
            await client.clear("p")

    asyncio.run(main())


ONE_STRING: dict[str, Call] = {
    "put": lambda plane: plane.put("p", "old", tags=[{}] * 3),
    "clear": lambda plane: plane.clear("p", "old"),
    "get": lambda plane: plane.get(meta("old", partition="p"), "x"),
    "list": lambda plane: plane.list_rows("p", keys="old"),
    "list-fields": lambda plane: plane.list_rows("p", fields="x"),
    "wait": lambda plane: plane.wait_ready("p", count=1, fields="x", timeout_s=60),
    "claim": lambda plane: plane.claim("p", "old", task="t"),
    "unload": lambda plane: plane.unload("p", "old"),
    "reset": lambda plane: plane.reset_consumption("p", keys="old"),
    "produced": lambda plane: plane.production_status("p", fields="x"),
    "hosts": lambda plane: plane.row_hosts("p", "old"),
}


@pytest.mark.parametrize("call", ONE_STRING)
def test_one_string_is_not_taken_for_the_names_of_its_characters(plane: LocalPlane, call: str) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            await client.put("p", ["old"], ONE)
            with pytest.raises(BatchError, match=r"must be a sequence of strings; got one string, '(old|x)'"):
                await ONE_STRING[call](client)
            assert (await client.list_rows("p")).keys == ("old",)
            await client.clear("p")

    asyncio.run(main())


OTHER_TYPES: dict[str, tuple[Any, str]] = {
    "key": (lambda plane: plane.put("p", ["a", 1], tags=[{}] * 2), "keys must be a sequence of strings; got 1 in it"),
    "field": (lambda plane: plane.list_rows("p", fields=[None]), "fields must be a sequence of strings; got None"),
    "bytes": (lambda plane: plane.clear("p", [b"a"]), "keys must be a sequence of strings; got b'a'"),
    "tag": (lambda plane: plane.put("p", ["a"], tags=[{1: 2}]), "name of a tag must be a string; got 1 in row 'a'"),
    "tags": (lambda plane: plane.put("p", ["a", "b"], tags=[{1: 2}] * 2), "must be a string; got 1 in row 'a'"),
    "filter": (lambda plane: plane.list_rows("p", where={"n": [1]}), r"can't be selected by tag 'n': .* got \[1\]"),
    "filter-name": (lambda plane: plane.list_rows("p", where={1: 1}), "can't be selected by tag 1: a name is a string"),
}


@pytest.mark.parametrize("call", OTHER_TYPES)
def test_names_and_tags_of_other_types_are_named(plane: LocalPlane, call: str) -> None:
    refused, wrong = OTHER_TYPES[call]

    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            with pytest.raises(BatchError, match=wrong):
                await refused(client)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("data", "tags", "wrong"),
    [
        ({"x": [1]}, None, r"data of a put must be a BatchData or a Draft; got dict"),
        (ONE, {"step": 1}, r"tags must be a list of mappings, one per key; got one mapping"),
    ],
)
def test_a_put_of_other_types_is_named(plane: LocalPlane, data: Any, tags: Any, wrong: str) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            with pytest.raises(BatchError, match=wrong):
                await client.put("p", ["a"], data, tags=tags)
            assert (await client.list_rows("p")).keys == ()

    asyncio.run(main())


@pytest.mark.parametrize("lengths", [[1 << 62] * 2, [1 << 70], [1 << 62]])
def test_a_draft_too_large_for_any_plane_is_refused(plane: LocalPlane, lengths: list[int]) -> None:
    async def main() -> None:
        spec = ColumnSpec(name="x", kind="ragged", dtype="int8")
        async with await connect(plane.descriptor) as client:
            with pytest.raises(BatchError, match=r"[cC]olumn 'x'"):
                await client.alloc([spec], len(lengths), {"x": lengths})

    asyncio.run(main())


def test_rows_that_do_not_fit_together_are_an_error_when_read_together(plane: LocalPlane) -> None:
    """Without a schema, a plane accepts any column; a get never converts or drops a row."""

    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            await client.put("p", ["f"], BatchData({"x": dense(np.ones(1, np.float32))}))
            await client.put("p", ["i"], BatchData({"x": dense(np.ones(1, np.int64))}))
            with pytest.raises(BatchError, match=r"Column 'x' differs.*float32.*int64"):
                await client.get(meta("f", "i", partition="p"), ["x"])
            assert (await client.get(meta("f", partition="p"), ["x"]))["x"].dtype == "float32"
            assert (await client.get(meta("i", partition="p"), ["x"]))["x"].dtype == "int64"

    asyncio.run(main())


def test_clearing_what_is_not_there_is_no_error(plane: LocalPlane) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            assert await client.clear("nowhere") == 0
            assert await client.clear("nowhere", ["ghost", "ghost"]) == 0
            assert (await client.list_rows("nowhere")).keys == ()

    asyncio.run(main())
