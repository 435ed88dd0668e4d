"""Conformance suite of the DataPlane port: what every plane must do, one test per sentence of the port.

Subclass it in a test module, say how to open a plane, and pytest runs it all:

    class TestMyPlane(DataPlaneSuite):
        @asynccontextmanager
        async def open_plane(self) -> AsyncIterator[DataPlane]:
            yield MyPlane()
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest

from rl_protocol.batch import BatchData
from rl_protocol.columns import dense, ragged
from rl_protocol.errors import BatchError, ConflictError, DuplicateKeyError, MissingDataError, PlaneTimeout
from rl_protocol.meta import KVBatchMeta, Scalar
from rl_protocol.ports import DataPlane
from rl_protocol.schema import ColumnSpec
from rl_protocol.testing.samples import assert_same_column, every_kind, keys_of, numbers, said

_SOON_S = 0.05
"""Long enough for a wrong answer to show, short enough for tests."""


class DataPlaneSuite:
    """Subclass and override `open_plane`; every test opens a fresh, empty plane."""

    def open_plane(self) -> AbstractAsyncContextManager[DataPlane]:
        """An empty plane, released when the context ends."""
        raise NotImplementedError

    def run(self, body: Callable[[DataPlane], Awaitable[None]]) -> None:
        """Open a plane and run the body of a test on it."""

        async def main() -> None:
            async with self.open_plane() as plane:
                await asyncio.wait_for(body(plane), 60)

        asyncio.run(main())

    # ------------------------------------------------------------------------------------------------------------ put and get
    def test_every_kind_of_column_comes_back_bit_equal(self) -> None:
        async def body(plane: DataPlane) -> None:
            batch = every_kind(5)
            meta = await plane.put("p", keys_of(range(5)), batch)
            got = await plane.get(meta)
            assert got.field_names == batch.field_names
            for name in batch.field_names:
                assert_same_column(got[name], batch[name])
            order = [4, 1, 3]
            got = await plane.get(meta.select_rows(order))
            for name in batch.field_names:
                assert_same_column(got[name], batch.select_rows(order)[name])

        self.run(body)

    def test_rows_from_several_puts_come_in_the_order_of_the_keys(self) -> None:
        async def body(plane: DataPlane) -> None:
            whole = every_kind(9)
            for start in (3, 0, 6):
                await plane.put("p", keys_of(range(start, start + 3)), whole.slice(start, start + 3))
            for order in (list(range(9)), [8, 0, 4, 5, 1], [2, 3], [1, 0]):
                got = await plane.get(KVBatchMeta(partition="p", keys=tuple(keys_of(order))), whole.field_names)
                for name in whole.field_names:
                    assert_same_column(got[name], whole.select_rows(order)[name])

        self.run(body)

    def test_put_describes_what_was_given(self) -> None:
        async def body(plane: DataPlane) -> None:
            meta = await plane.put("p", ["a", "b"], numbers([1, 2]), tags=[{"n": 1}, {"n": 2}])
            assert (meta.partition, meta.keys, meta.fields) == ("p", ("a", "b"), ("x",))
            assert meta.tags == ({"n": 1}, {"n": 2})
            later = await plane.put("p", ["b"], numbers([3], "y"))
            assert (later.keys, later.fields, later.tags) == (("b",), ("y",), ())

        self.run(body)

    def test_columns_arrive_later(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.put("p", ["a", "b"], numbers([1, 2]))
            await plane.put("p", ["b", "a"], numbers([20, 10], "y"))
            meta = await plane.list_rows("p")
            assert (meta.keys, set(meta.fields)) == (("a", "b"), {"x", "y"})
            got = await plane.get(meta)
            assert got.dense("x").values.tolist() == [1, 2]
            assert got.dense("y").values.tolist() == [10, 20]

        self.run(body)

    def test_a_column_put_again_replaces_the_former(self) -> None:
        async def body(plane: DataPlane) -> None:
            meta = await plane.put("p", ["a", "b", "c"], numbers([1, 2, 3]))
            before = await plane.get(meta)
            await plane.put("p", ["b"], numbers([20]))
            assert (await plane.get(meta)).dense("x").values.tolist() == [1, 20, 3]
            assert before.dense("x").values.tolist() == [1, 2, 3]
            await plane.put("p", ["a", "b", "c"], BatchData({"x": ragged([[1], [], [2, 3]], "int32")}))
            assert (await plane.get(meta)).ragged("x").lengths.tolist() == [1, 0, 2]

        self.run(body)

    def test_fields_select_columns(self) -> None:
        async def body(plane: DataPlane) -> None:
            data = BatchData({"x": dense([1, 2]), "y": dense([3, 4]), "z": dense([5, 6])})
            meta = await plane.put("p", ["a", "b"], data)
            got = await plane.get(meta, ["z", "x"])
            assert got.field_names == ("z", "x")
            assert (await plane.get(meta.select_fields(["y"]))).field_names == ("y",)
            assert len(await plane.get(meta, [])) == 2

        self.run(body)

    def test_putting_the_same_again_changes_nothing(self) -> None:
        async def body(plane: DataPlane) -> None:
            meta = await plane.put("p", ["a", "b"], numbers([1, 2]), tags=[{"n": 1}, {}])
            assert await plane.put("p", ["a", "b"], numbers([1, 2]), tags=[{"n": 1}, {}]) == meta
            assert (await plane.list_rows("p")).keys == ("a", "b")
            assert (await plane.get(meta)).dense("x").values.tolist() == [1, 2]

        self.run(body)

    def test_nothing_is_legal(self) -> None:
        async def body(plane: DataPlane) -> None:
            meta = await plane.put("p", [], numbers([]))
            assert (meta.keys, meta.fields) == ((), ("x",))
            assert len(await plane.get(meta)) == 0
            assert (await plane.list_rows("nowhere")).keys == ()
            assert (await plane.wait_ready("nowhere", count=0, timeout_s=1)).keys == ()

        self.run(body)

    # ------------------------------------------------------------------------------------------------------------------- tags
    def test_tags_are_merged_and_the_later_value_wins(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.put("p", ["a", "b"], tags=[{"n": 1, "s": "new"}, {"f": 0.5}])
            await plane.put("p", ["a"], tags=[{"s": "done", "none": None, "yes": True}])
            meta = await plane.list_rows("p")
            assert meta.tags == ({"n": 1, "s": "done", "none": None, "yes": True}, {"f": 0.5})
            assert [type(value) for value in meta.tags[0].values()] == [int, str, type(None), bool]

        self.run(body)

    def test_list_rows_by_tag_oldest_first(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.put("p", ["c", "a", "b"], tags=[{"k": 1}, {"k": 2}, {"k": 1, "m": None}])
            await plane.put("p", ["a", "d"], numbers([1, 2]), tags=[{"k": 1}, {"k": 1}])
            meta = await plane.list_rows("p", where={"k": 1})
            assert (meta.keys, meta.fields) == (("c", "a", "b", "d"), ())
            assert (await plane.list_rows("p", where={"m": None})).keys == ("b",)
            assert (await plane.list_rows("p", where={"k": 1, "m": 2})).keys == ()
            await plane.clear("p", ["c", "b"])
            assert (await plane.list_rows("p")).fields == ("x",)

        self.run(body)

    def test_partitions_are_apart(self) -> None:
        async def body(plane: DataPlane) -> None:
            one = await plane.put("one", ["a"], numbers([1]))
            two = await plane.put("two", ["a"], numbers([2]))
            assert (await plane.get(one)).dense("x").values.tolist() == [1]
            assert await plane.clear("one") == 1
            assert (await plane.get(two)).dense("x").values.tolist() == [2]

        self.run(body)

    # ------------------------------------------------------------------------------------------------------------------ errors
    def test_a_put_that_is_refused_stores_nothing(self) -> None:
        async def body(plane: DataPlane) -> None:
            with pytest.raises(DuplicateKeyError, match="twin"):
                await plane.put("p", ["a", "twin", "twin"], numbers([1, 2, 3]))
            with pytest.raises(BatchError):
                await plane.put("p", ["a"], numbers([1, 2]))
            with pytest.raises(BatchError):
                await plane.put("p", ["a"], numbers([1]), tags=[])
            assert (await plane.list_rows("p")).keys == ()
            assert (await plane.stats()).bytes_used == 0

        self.run(body)

    def test_a_tag_that_equals_nothing_is_refused_by_row_and_name(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.put("p", ["a"], tags=[{"n": float("-inf")}])
            assert (await plane.list_rows("p", where={"n": float("-inf")})).keys == ("a",)
            for bad in (float("nan"), np.float64("nan"), np.float32("nan"), [float("nan")]):
                tags: Any = [{"n": 1.0}, {"n": 2.0, "loss": bad}]
                with pytest.raises(BatchError, match=r"'loss' of row 'c'"):
                    await plane.put("p", ["b", "c"], tags=tags)
                with pytest.raises(BatchError, match=r"'loss' of row 'c'"):
                    await plane.put("p", ["c"], tags=tags[1:])
            assert (await plane.list_rows("p")).keys == ("a",)
            nothing: dict[str, Scalar] = {"n": float("nan")}
            for call in (
                plane.list_rows("p", where=nothing),
                plane.wait_ready("p", count=1, where=nothing, timeout_s=1),
                plane.watch("p", where=nothing, timeout_s=1),
                plane.put("p", ["a"], tags=[{"n": 1}], expect=[nothing]),
            ):
                with pytest.raises(BatchError, match=r"'n'.*NaN"):
                    await call

        self.run(body)

    def test_reads_are_strict(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.put("p", ["a", "b"], numbers([1, 2]))
            await plane.put("p", ["a"], numbers([1], "only_a"))
            with pytest.raises(MissingDataError, match="ghost"):
                await plane.get(KVBatchMeta(partition="p", keys=("a", "ghost")), ["x"])
            with pytest.raises(MissingDataError, match="ghost"):
                await plane.get(KVBatchMeta(partition="p", keys=("ghost",)), [])
            with pytest.raises(MissingDataError, match=r"'b'.*only_a|only_a.*'b'"):
                await plane.get(KVBatchMeta(partition="p", keys=("a", "b")), ["x", "only_a"])
            with pytest.raises(MissingDataError, match="never"):
                await plane.get(KVBatchMeta(partition="p", keys=("a",)), ["never"])
            with pytest.raises(MissingDataError):
                await plane.get(KVBatchMeta(partition="nowhere", keys=("a",)), ["x"])

        self.run(body)

    # ------------------------------------------------------------------------------------------------------------------- waiting
    def test_wait_ready_wakes_when_the_last_condition_is_met(self) -> None:
        async def body(plane: DataPlane) -> None:
            wish = plane.wait_ready("p", count=2, fields=["x", "y"], where={"go": True}, timeout_s=30)
            waiting = asyncio.ensure_future(wish)
            await asyncio.sleep(_SOON_S)
            await plane.put("p", ["a", "b", "c"], numbers([1, 2, 3]), tags=[{"go": True}, {"go": True}, {"go": True}])
            await plane.put("p", ["c"], numbers([3], "y"))
            await plane.put("p", ["b"], numbers([2], "y"), tags=[{"go": False}])
            await asyncio.sleep(_SOON_S)
            assert not waiting.done()
            await plane.put("p", ["b"], tags=[{"go": True, "n": 2}])
            meta = await waiting
            assert meta.keys == ("b", "c")
            assert meta.tags == ({"go": True, "n": 2}, {"go": True})
            assert set(meta.fields) == {"x", "y"}
            assert (await plane.get(meta)).dense("y").values.tolist() == [2, 3]

        self.run(body)

    def test_wait_ready_gives_exactly_the_oldest(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.put("p", keys_of(range(6)), numbers(range(6)))
            await plane.clear("p", keys_of([0]))
            await plane.put("p", keys_of([0]), numbers([0]))
            meta = await plane.wait_ready("p", count=3, timeout_s=1)
            assert list(meta.keys) == keys_of([1, 2, 3])
            again = await plane.wait_ready("p", count=6, timeout_s=1)
            assert list(again.keys) == keys_of([1, 2, 3, 4, 5, 0])

        self.run(body)

    def test_a_task_gets_each_row_once(self) -> None:
        async def body(plane: DataPlane) -> None:
            first = asyncio.ensure_future(plane.wait_ready("p", count=3, task="train", timeout_s=30))
            second = asyncio.ensure_future(plane.wait_ready("p", count=3, task="train", timeout_s=30))
            other = asyncio.ensure_future(plane.wait_ready("p", count=6, task="score", timeout_s=30))
            for i in range(6):
                await plane.put("p", keys_of([i]), numbers([i]))
            taken = [*(await first).keys, *(await second).keys]
            assert sorted(taken) == sorted(keys_of(range(6)))
            assert list((await other).keys) == keys_of(range(6))
            with pytest.raises(PlaneTimeout):
                await plane.wait_ready("p", count=1, task="train", timeout_s=_SOON_S)
            assert len(await plane.wait_ready("p", count=6, timeout_s=1)) == 6

        self.run(body)

    def test_a_row_made_anew_is_not_consumed(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.put("p", ["a"], numbers([1]), tags=[{"old": 1}])
            await plane.wait_ready("p", count=1, task="t", timeout_s=1)
            await plane.clear("p", ["a"])
            await plane.put("p", ["a"], numbers([2], "y"))
            meta = await plane.wait_ready("p", count=1, task="t", timeout_s=1)
            assert (meta.fields, meta.tags) == (("y",), ({},))
            with pytest.raises(MissingDataError):
                await plane.get(meta, ["x"])

        self.run(body)

    def test_the_timeout_says_how_many_rows_were_ready(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.put("p", ["a", "b", "c"], numbers([1, 2, 3]))
            await plane.wait_ready("p", count=1, task="t", timeout_s=1)
            with pytest.raises(PlaneTimeout, match=r"\b2 of 5\b"):
                await plane.wait_ready("p", count=5, fields=["x"], task="t", timeout_s=_SOON_S)
            meta = await plane.wait_ready("p", count=2, fields=["x"], task="t", timeout_s=1)
            assert meta.keys == ("b", "c")

        self.run(body)

    def test_a_cancelled_wait_takes_nothing(self) -> None:
        async def body(plane: DataPlane) -> None:
            gone = asyncio.ensure_future(plane.wait_ready("p", count=1, task="t", timeout_s=30))
            await asyncio.sleep(_SOON_S)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            await plane.put("p", ["a"], numbers([1]))
            assert (await plane.wait_ready("p", count=1, task="t", timeout_s=5)).keys == ("a",)

        self.run(body)

    def test_cleared_rows_are_not_waited_for(self) -> None:
        async def body(plane: DataPlane) -> None:
            waiting = asyncio.ensure_future(plane.wait_ready("p", count=2, timeout_s=30))
            await asyncio.sleep(_SOON_S)
            await plane.put("p", ["a"], numbers([1]))
            await plane.clear("p")
            await plane.put("p", ["b"], numbers([1]))
            await asyncio.sleep(_SOON_S)
            assert not waiting.done()
            await plane.put("p", ["a"], numbers([1]))
            assert (await waiting).keys == ("b", "a")

        self.run(body)

    # ------------------------------------------------------------------------------------------------- generations, expectations
    def test_a_row_made_anew_is_another_row(self) -> None:
        async def body(plane: DataPlane) -> None:
            old = await plane.put("p", ["a", "b"], numbers([1, 2]))
            again = await plane.put("p", ["a"], numbers([3], "y"))
            assert again.generations == old.generations[:1]
            await plane.clear("p", ["a"])
            new = await plane.put("p", ["a"], numbers([10]))
            assert new.generations != old.generations[:1]
            with pytest.raises(MissingDataError, match="'a'"):
                await plane.get(old)
            with pytest.raises(MissingDataError, match="'a'"):
                await plane.get(KVBatchMeta.concat([old.slice(1, 2), old.slice(0, 1)]))
            assert (await plane.get(old.slice(1, 2))).dense("x").values.tolist() == [2]
            assert (await plane.get(new)).dense("x").values.tolist() == [10]
            by_name = KVBatchMeta(partition="p", keys=("b", "a"))
            assert (await plane.get(by_name, ["x"])).dense("x").values.tolist() == [2, 10]
            listed, waited = await plane.list_rows("p"), await plane.wait_ready("p", count=2, timeout_s=1)
            assert listed.generations == waited.generations == (old.generations[1], new.generations[0])

        self.run(body)

    def test_a_put_that_expects_something_else_changes_nothing(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.put("p", ["a", "b"], tags=[{"s": "new", "n": 1}, {"s": "new"}])
            await plane.put("p", ["a", "b"], tags=[{"s": "mine"}, {"s": "mine"}], expect=[{"s": "new", "n": 1}, {}])
            with pytest.raises(ConflictError, match="'a'"):
                await plane.put("p", ["b", "a"], numbers([1, 2]), tags=[{"s": "no"}, {}], expect=[{}, {"s": "new"}])
            with pytest.raises(ConflictError, match="'a'"):
                await plane.put("p", ["c", "a"], numbers([1, 2]), tags=[{"s": "no"}, {}], expect=[None, None])
            with pytest.raises(ConflictError, match="'ghost'"):
                await plane.put("p", ["ghost"], tags=[{}], expect=[{"s": "new"}])
            with pytest.raises(ConflictError, match="ghost"):
                await plane.put("p", ["ghost"], tags=[{}], expect=[{}])
            with pytest.raises(BatchError):
                await plane.put("p", ["a"], tags=[{}], expect=[])
            rows = await plane.list_rows("p")
            assert (rows.keys, rows.fields, [tag["s"] for tag in rows.tags]) == (("a", "b"), (), ["mine", "mine"])
            assert (await plane.stats()).bytes_used == 0
            await plane.put("p", ["c"], tags=[{"s": "new"}], expect=[None])
            with pytest.raises(ConflictError, match="'c'"):
                await plane.put("p", ["c"], tags=[{"s": "new"}], expect=[None])

        self.run(body)

    def test_of_many_who_change_a_tag_only_one_succeeds(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.put("p", ["a"], tags=[{"turn": 0}])
            for turn in range(5):
                wishes = [plane.put("p", ["a"], tags=[{"turn": turn + 1}], expect=[{"turn": turn}]) for _ in range(4)]
                done = await asyncio.gather(*wishes, return_exceptions=True)
                assert sorted(type(result).__name__ for result in done) == ["ConflictError"] * 3 + ["KVBatchMeta"]

        self.run(body)

    # ------------------------------------------------------------------------------------------------------------ writing in place
    def test_a_draft_is_filled_in_place_and_put(self) -> None:
        async def body(plane: DataPlane) -> None:
            columns = [
                ColumnSpec(name="d", kind="dense", dtype="float32", dims=(3,)),
                ColumnSpec(name="r", kind="ragged", dtype="int64"),
                ColumnSpec(name="m", kind="ragged", dtype="bool", dims=(2,)),
            ]
            draft = await plane.alloc(columns, 2, {"r": [3, 0], "m": [0, 1]})
            assert (len(draft), draft.field_names) == (2, ("d", "r", "m"))
            draft["d"][:] = [[1, 2, 3], [4, 5, 6]]
            draft["r"][:] = [7, 8, 9]
            draft["m"][:] = [[True, False]]
            assert (await plane.stats()).bytes_used == 0
            meta = await plane.put("p", ["a", "b"], draft, tags=[{"n": 1}, {"n": 2}])
            assert (meta.fields, meta.tags) == (("d", "r", "m"), ({"n": 1}, {"n": 2}))
            got = await plane.get(meta.select_rows([1, 0]))
            assert got.dense("d").values.tolist() == [[4, 5, 6], [1, 2, 3]]
            assert [row.tolist() for row in got.ragged("r").rows()] == [[], [7, 8, 9]]
            assert [row.tolist() for row in got.ragged("m").rows()] == [[[True, False]], []]
            with pytest.raises(BatchError, match="already"):
                await plane.put("p", ["a", "b"], draft)
            with pytest.raises(BatchError, match="already"):
                draft["d"]
            await plane.clear("p")
            assert (await plane.stats()).bytes_used == 0

        self.run(body)

    def test_a_draft_can_be_given_up(self) -> None:
        async def body(plane: DataPlane) -> None:
            spec = ColumnSpec(name="x", kind="dense", dtype="int64")
            draft = await plane.alloc([spec], 1000)
            draft.discard()
            draft.discard()
            with pytest.raises(BatchError):
                draft["x"]
            stats = await plane.stats()
            assert (stats.bytes_used, stats.bytes_reserved) == (0, 0)
            for bad in (
                plane.alloc([ColumnSpec(name="o", kind="object")], 1),
                plane.alloc([spec], -1),
                plane.alloc([spec], 1, {"x": [1]}),
                plane.alloc([ColumnSpec(name="r", kind="ragged", dtype="int8")], 2, {"r": [1]}),
                plane.alloc([ColumnSpec(name="r", kind="ragged", dtype="int8")], 1, {"r": [-1]}),
            ):
                with pytest.raises(BatchError):
                    await bad

        self.run(body)

    # -------------------------------------------------------------------------------------------------------------------- watching
    def test_watch_tells_what_changed_and_nothing_else(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.put("p", keys_of(range(3)), tags=[{"n": i} for i in range(3)])
            first = await plane.watch("p", timeout_s=1)
            assert said(first) == (("row0", "row1", "row2"), set(), True)
            nothing = await plane.watch("p", since=first.version, timeout_s=0)
            assert (said(nothing), nothing.version) == (((), set(), False), first.version)
            await plane.put("p", ["row1"], numbers([1]))
            await plane.put("p", ["row3"], tags=[{"n": 3}])
            await plane.clear("p", ["row0"])
            await plane.put("p", ["row2"], tags=[{"n": 20}])
            await plane.put("other", ["x"], tags=[{}])
            second = await plane.watch("p", since=first.version, timeout_s=1)
            assert said(second) == (("row1", "row3", "row2"), {"row0"}, False)
            assert second.rows.tags == ({"n": 1}, {"n": 3}, {"n": 20})
            await plane.put("p", ["row0"], tags=[{"n": 0}])
            third = await plane.watch("p", since=first.version, timeout_s=1)
            assert said(third) == (("row1", "row3", "row2", "row0"), set(), False)
            assert said(await plane.watch("p", since=second.version, timeout_s=1)) == (("row0",), set(), False)

        self.run(body)

    def test_watch_wakes_when_something_changes(self) -> None:
        async def body(plane: DataPlane) -> None:
            version = (await plane.watch("p", timeout_s=1)).version
            assert version > 0
            for change, key in ((plane.put("p", ["a"], tags=[{"n": 1}]), "a"), (plane.clear("p", ["a"]), None)):
                waiting = asyncio.ensure_future(plane.watch("p", since=version, timeout_s=30))
                await asyncio.sleep(_SOON_S)
                await plane.put("other", ["b"], tags=[{}])
                await asyncio.sleep(_SOON_S)
                assert not waiting.done()
                await change
                changes = await waiting
                assert changes.rows.keys == ((key,) if key else ())
                assert changes.version > version
                version = changes.version
            assert said(await plane.watch("p", since=version, timeout_s=_SOON_S))[:2] == ((), set())

        self.run(body)

    def test_watch_by_tag_says_which_rows_do_not_fit_any_more(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.put("p", ["a", "b"], tags=[{"s": "done"}, {"s": "new"}])
            first = await plane.watch("p", where={"s": "done"}, timeout_s=1)
            assert said(first) == (("a",), set(), True)
            await plane.put("p", ["a", "b"], tags=[{"s": "new"}, {"s": "done"}])
            second = await plane.watch("p", since=first.version, where={"s": "done"}, timeout_s=1)
            assert said(second) == (("b",), {"a"}, False)

        self.run(body)

    # ------------------------------------------------------------------------------------------------------------------- consuming
    def test_list_rows_that_a_task_may_take(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.put("p", keys_of(range(4)), numbers(range(4)))
            await plane.put("p", keys_of([1, 2, 3]), numbers(range(3), "y"), tags=[{"k": i} for i in (1, 1, 2)])
            await plane.wait_ready("p", count=1, fields=["y"], task="t", timeout_s=1)
            assert list((await plane.list_rows("p", fields=["x", "y"], task="t")).keys) == keys_of([2, 3])
            assert list((await plane.list_rows("p", fields=["y"], where={"k": 1})).keys) == keys_of([1, 2])
            assert (await plane.list_rows("p", fields=["never"])).keys == ()
            assert len(await plane.list_rows("p", fields=["y"], task="t")) == 2

        self.run(body)

    def test_list_rows_that_are_named(self) -> None:
        async def body(plane: DataPlane) -> None:
            whole = await plane.put("p", keys_of(range(4)), numbers(range(4)), tags=[{"n": i} for i in range(4)])
            await plane.put("p", keys_of([1, 3]), numbers(range(2), "y"))
            named = await plane.list_rows("p", keys=["row3", "row1"])
            assert (named.keys, named.tags) == (("row3", "row1"), ({"n": 3}, {"n": 1}))
            assert (set(named.fields), named.generations) == ({"x", "y"}, (whole.generations[3], whole.generations[1]))
            assert (await plane.list_rows("p", keys=["row3", "row0"], fields=["y"])).keys == ("row3",)
            with pytest.raises(MissingDataError, match="'ghost'"):
                await plane.list_rows("p", keys=["row3", "ghost"])
            await plane.claim("p", ["row1"], task="t")
            stats = await plane.stats()
            assert (set(stats.columns["p"]), stats.tasks["p"]) == ({"x", "y"}, ("t",))

        self.run(body)

    def test_claim_takes_all_or_nothing(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.put("p", keys_of(range(4)), numbers(range(4)), tags=[{"n": i} for i in range(4)])
            meta = await plane.claim("p", ["row3", "row1"], task="t")
            assert (meta.keys, meta.tags, meta.fields) == (("row3", "row1"), ({"n": 3}, {"n": 1}), ("x",))
            with pytest.raises(ConflictError, match="'row1'"):
                await plane.claim("p", ["row0", "row1"], task="t")
            with pytest.raises(MissingDataError, match="'ghost'"):
                await plane.claim("p", ["row0", "ghost"], task="t")
            with pytest.raises(DuplicateKeyError):
                await plane.claim("p", ["row0", "row0"], task="t")
            assert (await plane.wait_ready("p", count=2, task="t", timeout_s=1)).keys == ("row0", "row2")
            assert len(await plane.claim("p", ["row0", "row1"], task="other")) == 2

        self.run(body)

    def test_status_of_production_and_consumption(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.put("p", keys_of(range(3)), numbers(range(3)))
            await plane.put("p", keys_of([1]), numbers([1], "y"))
            produced = await plane.production_status("p", fields=["y", "x", "never"])
            assert list(produced.keys) == keys_of(range(3))
            assert produced.flags.tolist() == [[False, True, False], [True, True, False], [False, True, False]]
            assert (await plane.consumption_status("p", task="t")).flags.tolist() == [False] * 3
            await plane.wait_ready("p", count=2, task="t", timeout_s=1)
            await plane.wait_ready("p", count=1, task="u", timeout_s=1)
            assert (await plane.consumption_status("p", task="t")).flags.tolist() == [True, True, False]
            assert await plane.reset_consumption("p", task="t", keys=["row1", "row2", "ghost"]) == 1
            assert (await plane.consumption_status("p", task="t")).flags.tolist() == [True, False, False]
            assert await plane.reset_consumption("p") == 1
            assert await plane.reset_consumption("nowhere") == 0
            assert (await plane.consumption_status("p", task="u")).flags.tolist() == [False] * 3
            nothing = await plane.production_status("nowhere", fields=["x", "y"])
            assert (nothing.keys, nothing.flags.shape) == ((), (0, 2))

        self.run(body)

    def test_rows_that_are_reset_wake_who_waits(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.put("p", keys_of(range(2)), numbers(range(2)))
            await plane.wait_ready("p", count=2, task="t", timeout_s=1)
            waiting = asyncio.ensure_future(plane.wait_ready("p", count=2, task="t", timeout_s=30))
            await asyncio.sleep(_SOON_S)
            assert await plane.reset_consumption("p", task="t") == 2
            assert list((await waiting).keys) == keys_of(range(2))

        self.run(body)

    # ------------------------------------------------------------------------------------------------------------------ clearing
    def test_clear_counts_what_was_there(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.put("p", keys_of(range(4)), numbers(range(4)))
            assert await plane.clear("p", [*keys_of([1, 2]), "ghost", "row1"]) == 2
            assert await plane.clear("p", keys_of([1, 2])) == 0
            assert list((await plane.list_rows("p")).keys) == keys_of([0, 3])
            assert await plane.clear("p", []) == 0
            assert await plane.clear("p") == 2
            assert await plane.clear("p") == 0
            assert await plane.clear("nowhere", ["a"]) == 0

        self.run(body)

    def test_what_was_read_stays_as_it_was(self) -> None:
        async def body(plane: DataPlane) -> None:
            meta = await plane.put("p", keys_of(range(4)), numbers(range(4)))
            got = (await plane.get(meta)).dense("x").values
            await plane.clear("p")
            for i in range(20):
                await plane.put("q", keys_of(range(4)), numbers([i + 100] * 4))
            assert got.tolist() == [0, 1, 2, 3]

        self.run(body)

    # ------------------------------------------------------------------------------------------------------------- stats, closing
    def test_stats_and_traffic(self) -> None:
        async def body(plane: DataPlane) -> None:
            data = numbers(range(100))
            meta = await plane.put("p", keys_of(range(100)), data)
            assert len(await plane.get(meta)) == 100
            stats = await plane.stats()
            assert stats.rows["p"] == 100
            assert stats.bytes_used >= data.nbytes
            traffic = plane.traffic()
            assert (traffic.data_written, traffic.data_read) == (data.nbytes, data.nbytes)
            await plane.clear("p")
            stats = await plane.stats()
            assert (stats.rows.get("p", 0), stats.bytes_used) == (0, 0)

        self.run(body)

    def test_close_twice(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.close()
            await plane.close()

        self.run(body)
