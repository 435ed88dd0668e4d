"""tqbridge: settings, renamed columns, schemas, rows fetched ahead, outputs of some rows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from rl_protocol import (
    BatchData,
    BatchSchema,
    ColumnSpec,
    ConfigError,
    KVBatchMeta,
    SameLength,
    SchemaError,
    dense,
    ragged,
)
from rl_protocol.bridge import Declaration, Output, declaration, fetch, tqbridge
from rl_protocol.bridge.replicas import broadcast, receive
from rl_protocol.errors import PlaneLostError, WorkerError
from rl_protocol.testing.memory_data_plane import MemoryDataPlane

SCHEMA = BatchSchema(
    [ColumnSpec(name=name, kind="ragged", dtype="float32") for name in ("x", "y", "z")],
    laws=[SameLength(("x", "y", "z"))],
)


@dataclass(frozen=True)
class Settings:
    source: tuple[str, ...] = ("x",)
    more: tuple[str, ...] = ()


class CountingPlane(MemoryDataPlane):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Sequence[str]] = []

    async def get(self, meta: KVBatchMeta, fields: Sequence[str] | None = None) -> BatchData:
        self.asked.append(tuple(fields or ()))
        return await super().get(meta, fields)


class Worker:
    def __init__(self, plane: MemoryDataPlane, columns: Settings) -> None:
        self.plane = plane
        self.columns = columns

    @tqbridge(
        reads=lambda settings: settings.source,
        reads_as={"w": "x"},
        writes=lambda settings: ("y", *settings.more),
        schema=SCHEMA,
    )
    async def negate(self, batch: BatchData, cut: int = 0) -> BatchData:
        rows = [-row[cut:] for row in batch.ragged("x").rows()]
        return BatchData({name: ragged(rows, "float32") for name in ("y", *self.columns.more)})

    @tqbridge(writes=("x",))
    async def begin(self, batch: BatchData) -> Output[int]:
        columns = BatchData({"x": ragged([[1.0]] * len(batch), "float32")})
        return Output(columns=columns, tags=[{"n": i} for i in range(len(batch))], result=len(batch))

    @tqbridge(reads=("x",), writes=("y",))
    async def some(self, batch: BatchData, rows: Sequence[int]) -> Output[str]:
        chosen = [batch.ragged("x").rows()[row] for row in rows]
        return Output(columns=BatchData({"y": ragged(chosen, "float32")}) if rows else None, rows=rows, result="done")

    @tqbridge(reads=("x",), writes=lambda settings: settings.more)
    async def maybe(self, batch: BatchData, *made: str) -> Output[str]:
        return Output(columns=BatchData(dict.fromkeys(made, batch["x"]), len(batch)), result="done")


async def stored(plane: MemoryDataPlane, name: str) -> KVBatchMeta:
    await plane.put("p", ["a", "b"], BatchData({name: ragged([[1.0, 2.0], [3.0]], "float32")}))
    return KVBatchMeta(partition="p", keys=("a", "b"))


def test_columns_follow_the_settings_of_the_worker_and_take_the_names_of_the_method() -> None:
    async def body() -> None:
        plane = CountingPlane()
        meta = await stored(plane, "w")
        worker = Worker(plane, Settings(source=("w",), more=("z",)))
        assert declaration(Worker.negate, worker.columns) == Declaration("negate", ("w",), ("y", "z"), {"w": "x"})
        out = await worker.negate(meta)
        assert out.fields == ("y", "z")
        assert [row.tolist() for row in (await plane.get(meta, ["z"])).ragged("z").rows()] == [[-1.0, -2.0], [-3.0]]
        assert plane.asked[0] == ("w",)

    asyncio.run(body())


def test_what_a_method_returns_is_checked_together_with_what_it_read() -> None:
    async def body() -> None:
        plane = CountingPlane()
        meta = await stored(plane, "x")
        with pytest.raises(SchemaError, match=r"Row 0 \('a'\), column 'y': expected length len\(x\) = 2, got 1"):
            await Worker(plane, Settings()).negate(meta, cut=1)
        assert (await plane.list_rows("p")).fields == ("x",)

    asyncio.run(body())


def test_an_output_chooses_rows_tags_and_result() -> None:
    async def body() -> None:
        plane = CountingPlane()
        worker, meta = Worker(plane, Settings()), KVBatchMeta(partition="p", keys=("a", "b", "c"))
        assert await worker.begin(meta) == 3
        assert plane.asked == []  # it reads nothing
        assert [tag["n"] for tag in (await plane.list_rows("p")).tags] == [0, 1, 2]
        assert await worker.some(meta, [2, 0]) == "done"
        assert set((await plane.list_rows("p", fields=["y"])).keys) == {"a", "c"}
        assert await worker.some(meta, []) == "done"

    asyncio.run(body())


def test_a_method_that_writes_nothing_under_some_settings_keeps_its_result() -> None:
    async def body() -> None:
        plane = CountingPlane()
        meta, worker = await stored(plane, "x"), Worker(plane, Settings())
        assert await worker.maybe(meta) == "done"
        with pytest.raises(SchemaError, match=r"maybe declares that it writes \[\]; it returned \['z'\]"):
            await worker.maybe(meta, "z")
        assert (await plane.list_rows("p")).fields == ("x",)
        assert await Worker(plane, Settings(more=("z",))).maybe(meta, "z") == "done"
        assert set((await plane.list_rows("p")).fields) == {"x", "z"}

    asyncio.run(body())


def test_rows_fetched_ahead_are_not_fetched_again_unless_the_columns_differ() -> None:
    async def body() -> None:
        plane = CountingPlane()
        meta = await stored(plane, "x")
        worker = Worker(plane, Settings())
        ahead = await fetch(worker, worker.negate, meta)
        assert plane.asked == [("x",)]
        assert (await worker.negate(ahead)).keys == meta.keys
        assert plane.asked == [("x",)]
        await worker.some(ahead, [0])  # of another declaration
        assert plane.asked == [("x",), ("x",)]

    asyncio.run(body())


def test_columns_declared_twice_under_some_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be declared once"):
        declaration(Worker.negate, Settings(more=("y",)))


class Recorded:
    leader = True

    def __init__(self) -> None:
        self.message = b""

    def share(self, message: bytes | None) -> bytes:
        self.message = message if message is not None else self.message
        return self.message


def test_replicas_receive_the_columns_or_an_error_of_the_same_class() -> None:
    group = Recorded()
    broadcast(group, BatchData({"x": dense(np.array([1.0, 2.0]))}))
    assert receive(group, "stage").dense("x").values.tolist() == [1.0, 2.0]
    broadcast(group, PlaneLostError("the controller is gone"))
    with pytest.raises(PlaneLostError, match=r"stage: the leader of .* could not fetch: the controller is gone"):
        receive(group, "stage")
    broadcast(group, SchemaError("not an error of the plane"))
    with pytest.raises(WorkerError, match="not an error of the plane"):
        receive(group, "stage")


@dataclass(frozen=True)
class SettingsOfBatches(Settings):
    """Reads x or w as x, as the rows say."""

    def for_batch(self, meta: KVBatchMeta) -> Settings:
        return Settings(source=("w",)) if meta.extra_info.get("from") == "w" else Settings()


def test_settings_can_choose_the_columns_of_each_batch() -> None:
    async def body() -> None:
        plane = CountingPlane()
        columns = {"x": ragged([[1.0]], "float32"), "w": ragged([[2.0]], "float32")}
        batch = await plane.put("train", ["a"], BatchData(columns))
        other = replace(batch, extra_info={"from": "w"})
        worker = Worker(plane, SettingsOfBatches())
        await worker.negate(batch)
        ahead = await fetch(worker, worker.negate, other)
        await worker.negate(ahead)
        assert plane.asked == [("x",), ("w",)]
        assert (await plane.get(batch, ["y"])).ragged("y").values.tolist() == [-2.0]

    asyncio.run(body())
