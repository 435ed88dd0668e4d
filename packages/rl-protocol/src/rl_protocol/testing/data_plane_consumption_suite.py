"""Conformance tests of waiting, watching and consumption; part of `DataPlaneSuite`."""

from __future__ import annotations

import asyncio

import pytest

from rl_protocol.errors import ConflictError, DuplicateKeyError, MissingDataError, PlaneTimeout
from rl_protocol.ports import DataPlane
from rl_protocol.testing.data_plane_suite_base import DataPlaneSuiteBase
from rl_protocol.testing.sample_batches import keys_of, numbers, summary_of

_SOON_S = 0.05
"""Long enough for a wrong answer to arrive, short enough for tests."""


class ConsumptionSuite(DataPlaneSuiteBase):
    """Tests of the calls that consumers use."""

    # ---- waiting
    def test_wait_ready_wakes_when_the_last_condition_is_met(self) -> None:
        async def body(plane: DataPlane) -> None:
            wish = plane.wait_ready("p", count=2, fields=["x", "y"], where={"go": True}, timeout_s=60)
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
            meta = await plane.wait_ready("p", count=3, timeout_s=60)
            assert list(meta.keys) == keys_of([1, 2, 3])
            again = await plane.wait_ready("p", count=6, timeout_s=60)
            assert list(again.keys) == keys_of([1, 2, 3, 4, 5, 0])

        self.run(body)

    def test_a_task_gets_each_row_once(self) -> None:
        async def body(plane: DataPlane) -> None:
            first = asyncio.ensure_future(plane.wait_ready("p", count=3, task="train", timeout_s=60))
            second = asyncio.ensure_future(plane.wait_ready("p", count=3, task="train", timeout_s=60))
            other = asyncio.ensure_future(plane.wait_ready("p", count=6, task="score", timeout_s=60))
            for i in range(6):
                await plane.put("p", keys_of([i]), numbers([i]))
            taken = [*(await first).keys, *(await second).keys]
            assert sorted(taken) == sorted(keys_of(range(6)))
            assert list((await other).keys) == keys_of(range(6))
            with pytest.raises(PlaneTimeout):
                await plane.wait_ready("p", count=1, task="train", timeout_s=_SOON_S)
            assert len(await plane.wait_ready("p", count=6, timeout_s=60)) == 6

        self.run(body)

    def test_a_row_made_anew_is_not_consumed(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.put("p", ["a"], numbers([1]), tags=[{"old": 1}])
            await plane.wait_ready("p", count=1, task="t", timeout_s=60)
            await plane.clear("p", ["a"])
            await plane.put("p", ["a"], numbers([2], "y"))
            meta = await plane.wait_ready("p", count=1, task="t", timeout_s=60)
            assert (meta.fields, meta.tags) == (("y",), ({},))
            with pytest.raises(MissingDataError):
                await plane.get(meta, ["x"])

        self.run(body)

    def test_the_timeout_says_how_many_rows_were_ready(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.put("p", ["a", "b", "c"], numbers([1, 2, 3]))
            await plane.wait_ready("p", count=1, task="t", timeout_s=60)
            with pytest.raises(PlaneTimeout, match=r"\b2 of 5\b"):
                await plane.wait_ready("p", count=5, fields=["x"], task="t", timeout_s=_SOON_S)
            meta = await plane.wait_ready("p", count=2, fields=["x"], task="t", timeout_s=60)
            assert meta.keys == ("b", "c")

        self.run(body)

    def test_a_cancelled_wait_takes_nothing(self) -> None:
        async def body(plane: DataPlane) -> None:
            gone = asyncio.ensure_future(plane.wait_ready("p", count=1, task="t", timeout_s=60))
            await asyncio.sleep(_SOON_S)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            await plane.put("p", ["a"], numbers([1]))
            assert (await plane.wait_ready("p", count=1, task="t", timeout_s=60)).keys == ("a",)

        self.run(body)

    def test_cleared_rows_are_not_waited_for(self) -> None:
        async def body(plane: DataPlane) -> None:
            waiting = asyncio.ensure_future(plane.wait_ready("p", count=2, timeout_s=60))
            await asyncio.sleep(_SOON_S)
            await plane.put("p", ["a"], numbers([1]))
            await plane.clear("p")
            await plane.put("p", ["b"], numbers([1]))
            await asyncio.sleep(_SOON_S)
            assert not waiting.done()
            await plane.put("p", ["a"], numbers([1]))
            assert (await waiting).keys == ("b", "a")

        self.run(body)

    # ---- watching
    def test_watch_tells_what_changed_and_nothing_else(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.put("p", keys_of(range(3)), tags=[{"n": i} for i in range(3)])
            first = await plane.watch("p", timeout_s=60)
            assert summary_of(first) == (("row0", "row1", "row2"), set(), True)
            nothing = await plane.watch("p", since=first.version, timeout_s=0)
            assert (summary_of(nothing), nothing.version) == (((), set(), False), first.version)
            await plane.put("p", ["row1"], numbers([1]))
            await plane.put("p", ["row3"], tags=[{"n": 3}])
            await plane.clear("p", ["row0"])
            await plane.put("p", ["row2"], tags=[{"n": 20}])
            await plane.put("other", ["x"], tags=[{}])
            second = await plane.watch("p", since=first.version, timeout_s=60)
            assert summary_of(second) == (("row1", "row3", "row2"), {"row0"}, False)
            assert second.rows.tags == ({"n": 1}, {"n": 3}, {"n": 20})
            await plane.put("p", ["row0"], tags=[{"n": 0}])
            third = await plane.watch("p", since=first.version, timeout_s=60)
            assert summary_of(third) == (("row1", "row3", "row2", "row0"), set(), False)
            assert summary_of(await plane.watch("p", since=second.version, timeout_s=60)) == (("row0",), set(), False)

        self.run(body)

    def test_watch_wakes_when_something_changes(self) -> None:
        async def body(plane: DataPlane) -> None:
            version = (await plane.watch("p", timeout_s=60)).version
            assert version > 0
            for change, key in ((plane.put("p", ["a"], tags=[{"n": 1}]), "a"), (plane.clear("p", ["a"]), None)):
                waiting = asyncio.ensure_future(plane.watch("p", since=version, timeout_s=60))
                await asyncio.sleep(_SOON_S)
                await plane.put("other", ["b"], tags=[{}])
                await asyncio.sleep(_SOON_S)
                assert not waiting.done()
                await change
                changes = await waiting
                assert changes.rows.keys == ((key,) if key else ())
                assert changes.version > version
                version = changes.version
            assert summary_of(await plane.watch("p", since=version, timeout_s=_SOON_S))[:2] == ((), set())

        self.run(body)

    def test_watch_by_tag_says_which_rows_do_not_fit_any_more(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.put("p", ["a", "b"], tags=[{"s": "done"}, {"s": "new"}])
            first = await plane.watch("p", where={"s": "done"}, timeout_s=60)
            assert summary_of(first) == (("a",), set(), True)
            await plane.put("p", ["a", "b"], tags=[{"s": "new"}, {"s": "done"}])
            second = await plane.watch("p", since=first.version, where={"s": "done"}, timeout_s=60)
            assert summary_of(second) == (("b",), {"a"}, False)

        self.run(body)

    # ---- consuming
    def test_list_rows_that_a_task_may_take(self) -> None:
        async def body(plane: DataPlane) -> None:
            await plane.put("p", keys_of(range(4)), numbers(range(4)))
            await plane.put("p", keys_of([1, 2, 3]), numbers(range(3), "y"), tags=[{"k": i} for i in (1, 1, 2)])
            await plane.wait_ready("p", count=1, fields=["y"], task="t", timeout_s=60)
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
            assert (await plane.wait_ready("p", count=2, task="t", timeout_s=60)).keys == ("row0", "row2")
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
            await plane.wait_ready("p", count=2, task="t", timeout_s=60)
            await plane.wait_ready("p", count=1, task="u", timeout_s=60)
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
            await plane.wait_ready("p", count=2, task="t", timeout_s=60)
            waiting = asyncio.ensure_future(plane.wait_ready("p", count=2, task="t", timeout_s=60))
            await asyncio.sleep(_SOON_S)
            assert await plane.reset_consumption("p", task="t") == 2
            assert list((await waiting).keys) == keys_of(range(2))

        self.run(body)
