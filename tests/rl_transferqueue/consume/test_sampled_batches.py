"""`draw`: no row is drawn twice or lost, and all ranks get the same rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from rl_protocol import BatchData, KVBatchMeta, PlaneTimeout, dense
from rl_protocol.errors import CapacityTimeout
from rl_protocol.ports import DataPlane
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_transferqueue import connect
from rl_transferqueue.consume import sampled_batches
from rl_transferqueue.consume.sampled_batches import DrawSettings, draw, draws_of
from rl_transferqueue.consume.samplers import Groups, LengthBalanced, RankAware, Sequential, WholeGroups

T = TypeVar("T")
Opener = Callable[[], "AsyncGenerator[DataPlane]"]
Body = Callable[[Callable[[], Awaitable[DataPlane]]], Awaitable[None]]


@pytest.fixture(params=["memory", "real"])
def run(request: pytest.FixtureRequest) -> Callable[[Body], None]:
    """Return a function that runs a test's body, which may open several clients of one plane."""
    memory = MemoryDataPlane()

    @asynccontextmanager
    async def clients() -> AsyncGenerator[Callable[[], Awaitable[DataPlane]]]:
        opened: list[DataPlane] = []

        async def open_client() -> DataPlane:
            if request.param == "memory":
                return memory
            opened.append(await connect(request.getfixturevalue("plane").descriptor))
            return opened[-1]

        yield open_client
        for client in opened:
            await client.close()

    def run_it(body: Body) -> None:
        async def main() -> None:
            async with asyncio.timeout(120), clients() as open_client:
                await body(open_client)

        asyncio.run(main())

    return run_it


def wanted(*, count: int, task: str = "t", fields: tuple[str, ...] = (), timeout_s: float = 60.0) -> DrawSettings:
    return DrawSettings(partition="p", task=task, count=count, fields=fields, timeout_s=timeout_s)


async def fill(plane: DataPlane, rows: range, per_group: int = 2) -> None:
    data = BatchData({"x": dense([float(i) for i in rows])})
    await plane.put("p", [f"k{i}" for i in rows], data, tags=[{"uid": i // per_group, "len": i} for i in rows])


def test_a_group_is_drawn_once_it_is_complete(run: Callable[[Body], None]) -> None:
    async def body(client: Callable[[], Awaitable[DataPlane]]) -> None:
        plane = await client()
        await fill(plane, range(1, 4))
        sampler = WholeGroups(Groups("uid", 2))
        ((first,)) = await draw(plane, sampler, wanted(count=1, fields=("x",)))
        assert first.keys == ("k2", "k3")
        waiting = asyncio.ensure_future(draw(plane, sampler, wanted(count=1, fields=("x",))))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await fill(plane, range(1))
        (second,) = await waiting
        assert sorted(second.keys) == ["k0", "k1"]
        assert sorted((await plane.get(second)).dense("x").values.tolist()) == [0.0, 1.0]
        await plane.clear("p")

    run(body)


def test_a_draw_that_waits_lists_the_rows_of_several_changes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    plane, lists, rests = MemoryDataPlane(), list[int](), list[float]()
    list_rows = plane.list_rows

    async def counted(*args: Any, **kwargs: Any) -> KVBatchMeta:
        found = await list_rows(*args, **kwargs)
        lists.append(len(found))
        return found

    async def rest(seconds: float) -> None:
        rests.append(seconds)
        for row in range(50):
            await fill(plane, range(row, row + 1))

    monkeypatch.setattr(plane, "list_rows", counted)
    monkeypatch.setattr(sampled_batches, "asyncio", SimpleNamespace(sleep=rest))
    (keys,) = asyncio.run(draw(plane, Sequential(), wanted(count=50)))
    assert (len(keys.keys), lists, len(rests)) == (50, [0, 50], 1)
    assert 0 < rests[0] <= 60


def test_concurrent_draws_share_the_rows(run: Callable[[Body], None]) -> None:
    async def body(client: Callable[[], Awaitable[DataPlane]]) -> None:
        planes = [await client() for _ in range(4)]
        await fill(planes[0], range(64))

        async def work(plane: DataPlane) -> list[str]:
            got: list[str] = []
            for _ in range(4):
                (meta,) = await draw(plane, Sequential(), wanted(count=4))
                got += meta.keys
            return got

        parts = await asyncio.gather(*(work(plane) for plane in planes))
        assert sorted(key for part in parts for key in part) == sorted(f"k{i}" for i in range(64))
        with pytest.raises(PlaneTimeout, match="rows that were ready: 0"):
            await draw(planes[0], Sequential(), wanted(count=1, timeout_s=0.05))
        assert len((await draw(planes[0], Sequential(), wanted(task="other", count=64)))[0]) == 64

    run(body)


def test_all_ranks_get_the_same_rows_for_a_turn(run: Callable[[Body], None]) -> None:
    async def body(client: Callable[[], Awaitable[DataPlane]]) -> None:
        planes = [await client() for _ in range(4)]
        sampler = LengthBalanced(2, "len", Groups("uid", 2))

        async def rank(plane: DataPlane) -> list[list[tuple[str, ...]]]:
            turns: list[list[tuple[str, ...]]] = []
            for turn in range(3):
                shares = await draw(plane, sampler, wanted(count=4), turn=str(turn))
                turns.append([share.keys for share in shares])
            return turns

        asking = [asyncio.ensure_future(rank(plane)) for plane in planes]
        for start in range(0, 24, 3):
            await asyncio.sleep(0.01)
            await fill(planes[0], range(start, start + 3))
        answers = await asyncio.gather(*asking)
        assert all(answer == answers[0] for answer in answers)
        drawn = [key for shares in answers[0] for share in shares for key in share]
        assert sorted(drawn) == sorted(f"k{i}" for i in range(24))
        assert (await planes[0].stats()).rows[draws_of("p")] == 3

    run(body)


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_rows_of_a_choice_that_is_not_published_can_be_drawn_again(
    run: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async def body(client: Callable[[], Awaitable[DataPlane]]) -> None:
        plane, other = await client(), await client()
        await fill(plane, range(4))
        await draw(plane, Sequential(), wanted(count=1), turn="0")
        put = plane.put

        async def put_or_leave(partition: str, keys: list[str], data: BatchData | None = None, **more: Any) -> Any:
            if data is None:
                return await put(partition, keys, **more)
            if how == "failed":
                raise CapacityTimeout("the plane is full")
            drawing.cancel()
            return await asyncio.sleep(60)

        monkeypatch.setattr(plane, "put", put_or_leave)
        drawing = asyncio.ensure_future(draw(plane, Sequential(), wanted(count=2), turn="1"))
        with pytest.raises(CapacityTimeout if how == "failed" else asyncio.CancelledError):
            await drawing
        monkeypatch.undo()
        assert (await other.consumption_status("p", task="t")).flags.tolist() == [True, False, False, False]
        (rows,) = await draw(other, Sequential(), wanted(count=3), turn="1")
        assert rows.keys == ("k1", "k2", "k3")
        for partition in ("p", draws_of("p")):
            await plane.clear(partition)

    run(body)


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_a_choice_that_was_stored_is_kept_although_its_answer_is_lost(
    run: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async def body(client: Callable[[], Awaitable[DataPlane]]) -> None:
        plane, other = await client(), await client()
        await fill(plane, range(4))
        put = plane.put
        chosen: list[tuple[str, ...]] = []

        async def put_and_lose(partition: str, keys: list[str], data: BatchData | None = None, **more: Any) -> Any:
            made = await put(partition, keys, data, **more)
            if data is not None:
                monkeypatch.undo()
                chosen.extend(share.keys for share in await draw(other, RankAware(2), wanted(count=2), turn="0"))
                if how == "failed":
                    raise PlaneTimeout("no answer")
                drawing.cancel()
                await asyncio.sleep(60)
            return made

        monkeypatch.setattr(plane, "put", put_and_lose)
        drawing = asyncio.ensure_future(draw(plane, RankAware(2), wanted(count=2), turn="0"))
        with pytest.raises(PlaneTimeout if how == "failed" else asyncio.CancelledError):
            await drawing
        assert chosen == [("k0",), ("k1",)]
        following = await draw(other, RankAware(2), wanted(count=2), turn="1")
        assert [share.keys for share in following] == [("k2",), ("k3",)]
        again = await draw(plane, RankAware(2), wanted(count=2), turn="0")
        assert [share.keys for share in again] == chosen, "a rank that restarts gets the rows of its turn"
        for partition in ("p", draws_of("p")):
            await plane.clear(partition)

    run(body)


def test_a_draw_that_is_cancelled_at_any_await_loses_no_row_and_no_turn() -> None:
    class Slow(MemoryDataPlane):
        """Calls take a while, and some are made although their answers are lost. A claim is not, as
        the port says."""

        async def put(self, *args: Any, **kwargs: Any) -> KVBatchMeta:
            return await self._slowly(super().put(*args, **kwargs))

        async def get(self, *args: Any, **kwargs: Any) -> BatchData:
            return await self._slowly(super().get(*args, **kwargs))

        async def list_rows(self, *args: Any, **kwargs: Any) -> KVBatchMeta:
            return await self._slowly(super().list_rows(*args, **kwargs))

        async def _slowly(self, call: Coroutine[Any, Any, T]) -> T:
            try:
                await asyncio.sleep(0)
            except BaseException:
                call.close()
                raise
            made = await call
            await asyncio.sleep(0)
            return made

    async def cancelled_after(steps: int) -> bool:
        plane = Slow()
        await fill(plane, range(4))
        first, second = (
            asyncio.ensure_future(draw(plane, Sequential(), wanted(count=2, timeout_s=5.0), turn="0")) for _ in range(2)
        )
        for _ in range(steps):
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait((first,))
        (rows,) = await second
        (following,) = await draw(plane, Sequential(), wanted(count=2, timeout_s=5.0), turn="1")
        (again,) = await draw(plane, Sequential(), wanted(count=2, timeout_s=5.0), turn="0")
        assert sorted(rows.keys + following.keys) == ["k0", "k1", "k2", "k3"], steps
        assert again.keys == rows.keys, steps
        return first.cancelled()

    async def main() -> None:
        steps = 0
        while await cancelled_after(steps):
            steps += 1
        assert steps > 5

    asyncio.run(main())


def test_another_process_chooses_if_the_first_gives_up(run: Callable[[Body], None]) -> None:
    async def body(client: Callable[[], Awaitable[DataPlane]]) -> None:
        one, two = await client(), await client()
        first = asyncio.ensure_future(draw(one, RankAware(2), wanted(count=2, timeout_s=0.2), turn="0"))
        await asyncio.sleep(0.05)
        second = asyncio.ensure_future(draw(two, RankAware(2), wanted(count=2), turn="0"))
        with pytest.raises(PlaneTimeout, match="could not draw 2 units"):
            await first
        await fill(one, range(2))
        assert [share.keys for share in await second] == [("k0",), ("k1",)]

    run(body)
