"""Drawing batches with samplers: nothing twice, nothing lost, ranks agree."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from rl_protocol import BatchData, PlaneTimeout, dense
from rl_protocol.ports import DataPlane
from rl_protocol.testing.fakes import MemoryDataPlane
from rl_transferqueue import connect
from rl_transferqueue.draws import draw, draws_of
from rl_transferqueue.samplers import Groups, LengthBalanced, RankAware, Sequential, WholeGroups

Opener = Callable[[], "AsyncGenerator[DataPlane]"]
Body = Callable[[Callable[[], Awaitable[DataPlane]]], Awaitable[None]]


@pytest.fixture(params=["memory", "real"])
def run(request: pytest.FixtureRequest) -> Callable[[Body], None]:
    """Run a test's body, which may open as many clients of one plane as it likes."""
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
            async with asyncio.timeout(30), clients() as open_client:
                await body(open_client)

        asyncio.run(main())

    return run_it


async def fill(plane: DataPlane, rows: range, per_group: int = 2) -> None:
    data = BatchData({"x": dense([float(i) for i in rows])})
    await plane.put("p", [f"k{i}" for i in rows], data, tags=[{"uid": i // per_group, "len": i} for i in rows])


def test_whole_groups_come_out_as_soon_as_they_are_whole(run: Callable[[Body], None]) -> None:
    async def body(client: Callable[[], Awaitable[DataPlane]]) -> None:
        plane = await client()
        await fill(plane, range(1, 4))
        sampler = WholeGroups(Groups("uid", 2))
        ((first,)) = await draw(plane, sampler, "p", task="t", count=1, fields=["x"], timeout_s=5)
        assert first.keys == ("k2", "k3")
        waiting = asyncio.ensure_future(draw(plane, sampler, "p", task="t", count=1, fields=["x"], timeout_s=20))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await fill(plane, range(1))
        (second,) = await waiting
        assert sorted(second.keys) == ["k0", "k1"]
        assert sorted((await plane.get(second)).dense("x").values.tolist()) == [0.0, 1.0]
        await plane.clear("p")

    run(body)


def test_many_who_draw_at_once_share_the_rows(run: Callable[[Body], None]) -> None:
    async def body(client: Callable[[], Awaitable[DataPlane]]) -> None:
        planes = [await client() for _ in range(4)]
        await fill(planes[0], range(64))

        async def work(plane: DataPlane) -> list[str]:
            got: list[str] = []
            for _ in range(4):
                (meta,) = await draw(plane, Sequential(), "p", task="t", count=4, timeout_s=20)
                got += meta.keys
            return got

        parts = await asyncio.gather(*(work(plane) for plane in planes))
        assert sorted(key for part in parts for key in part) == sorted(f"k{i}" for i in range(64))
        with pytest.raises(PlaneTimeout, match="0 rows were ready"):
            await draw(planes[0], Sequential(), "p", task="t", count=1, timeout_s=0.05)
        assert len((await draw(planes[0], Sequential(), "p", task="other", count=64, timeout_s=5))[0]) == 64

    run(body)


def test_all_who_ask_for_a_turn_get_the_same(run: Callable[[Body], None]) -> None:
    async def body(client: Callable[[], Awaitable[DataPlane]]) -> None:
        planes = [await client() for _ in range(4)]
        sampler = LengthBalanced(2, "len", Groups("uid", 2))

        async def rank(plane: DataPlane) -> list[list[tuple[str, ...]]]:
            turns: list[list[tuple[str, ...]]] = []
            for turn in range(3):
                shares = await draw(plane, sampler, "p", task="t", count=4, turn=str(turn), timeout_s=20)
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


def test_if_the_one_who_chooses_gives_up_another_chooses(run: Callable[[Body], None]) -> None:
    async def body(client: Callable[[], Awaitable[DataPlane]]) -> None:
        one, two = await client(), await client()
        first = asyncio.ensure_future(draw(one, RankAware(2), "p", task="t", count=2, turn="0", timeout_s=0.2))
        await asyncio.sleep(0.05)
        second = asyncio.ensure_future(draw(two, RankAware(2), "p", task="t", count=2, turn="0", timeout_s=20))
        with pytest.raises(PlaneTimeout, match="could not draw 2 units"):
            await first
        await fill(one, range(2))
        assert [share.keys for share in await second] == [("k0",), ("k1",)]

    run(body)
