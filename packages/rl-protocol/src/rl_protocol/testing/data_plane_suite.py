"""Conformance suite of the DataPlane port, with one test per rule of the port.

Subclass it in a test module and override `open_plane`:

    class TestMyPlane(DataPlaneSuite):
        @asynccontextmanager
        async def open_plane(self) -> AsyncIterator[DataPlane]:
            yield MyPlane()
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import dense, ragged
from rl_protocol.batch.kv_batch_meta import KVBatchMeta, Scalar
from rl_protocol.batch.schema import ColumnSpec
from rl_protocol.errors import BatchError, ConflictError, DuplicateKeyError, MissingDataError
from rl_protocol.ports import DataPlane
from rl_protocol.testing.data_plane_consumption_suite import ConsumptionSuite
from rl_protocol.testing.sample_batches import assert_same_column, every_kind, keys_of, numbers

_SOON_S = 0.05
"""Long enough for a wrong answer to show, short enough for tests."""


class DataPlaneSuite(ConsumptionSuite):
    """Subclass and override `open_plane`; every test opens a fresh, empty plane."""

    # ---- put and get
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
            assert (await plane.wait_ready("nowhere", count=0, timeout_s=60)).keys == ()

        self.run(body)

    # ---- tags
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

    # ---- errors
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
                plane.wait_ready("p", count=1, where=nothing, timeout_s=60),
                plane.watch("p", where=nothing, timeout_s=60),
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

    # ---- generations, expectations
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
            listed, waited = await plane.list_rows("p"), await plane.wait_ready("p", count=2, timeout_s=60)
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

    # ---- writing in place
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

    # ---- clearing
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

    def test_unloaded_rows_can_be_read(self) -> None:
        async def body(plane: DataPlane) -> None:
            meta = await plane.put("p", keys_of(range(4)), numbers(range(4)))
            await plane.unload("p", [*keys_of([1, 2]), "ghost"])
            await plane.unload("nowhere", ["a"])
            assert (await plane.get(meta)).dense("x").values.tolist() == [0, 1, 2, 3]

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

    # ---- where rows are
    def test_row_hosts_counts_the_bytes_of_each_row(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.put("p", ["none"], tags=[{"n": 1}])
            two = {name: dense(np.ones((2, 4096), np.int64)) for name in ("x", "z")}
            await plane.put("p", ["a", "b"], BatchData(two))
            await plane.put("p", ["b"], BatchData({"y": dense(np.ones((1, 4096), np.int64))}))
            found = await plane.row_hosts("p", ["b", "none", "a"])
            assert found.nbytes.shape == (3, len(found.hosts))
            assert found.nbytes.sum(axis=1).tolist() == [3 * 4096 * 8, 0, 2 * 4096 * 8]
            assert (await plane.row_hosts("p", [])).nbytes.shape == (0, len(found.hosts))
            with pytest.raises(MissingDataError, match="ghost"):
                await plane.row_hosts("p", ["a", "ghost"])

        self.run(body)

    # ---- stats, closing
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
