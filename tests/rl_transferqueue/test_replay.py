"""The replay buffer over a plane: the same behaviour over the in-memory one and the real one, restarts included."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from rl_protocol import BatchData, BatchError, KVBatchMeta, PlaneLostError, PlaneTimeout, RolloutError, dense
from rl_protocol.ports import DataPlane
from rl_protocol.testing.fakes import MemoryDataPlane
from rl_transferqueue import LocalPlane, TransferQueueConfig, connect, start_local_plane
from rl_transferqueue.groups import Lease, ReplayConfig
from rl_transferqueue.replay import ReplayBuffer, settle

Body = Callable[[DataPlane], Awaitable[None]]
CONFIG = ReplayConfig(groups_per_version=2, max_staleness=1)


@pytest.fixture(params=["memory", "real"])
def run(request: pytest.FixtureRequest) -> Callable[[Body], None]:
    """Run a test's body over a plane."""

    @asynccontextmanager
    async def open_plane() -> AsyncGenerator[DataPlane]:
        if request.param == "memory":
            yield MemoryDataPlane()
        else:
            async with await connect(request.getfixturevalue("plane").descriptor) as client:
                yield client

    def run_it(body: Body) -> None:
        async def main() -> None:
            async with open_plane() as plane:
                await asyncio.wait_for(body(plane), 30)

        asyncio.run(main())

    return run_it


def rows(*scores: float) -> BatchData:
    return BatchData({"score": dense([float(s) for s in scores])})


async def settle_all(plane: DataPlane, lease: Lease, *, failed: int = 0) -> None:
    for i, session in enumerate(lease.sessions):
        if i < failed:
            await settle(plane, lease, session, error="no luck")
        else:
            await settle(plane, lease, session, rows(session))


async def left(plane: DataPlane) -> dict[str, int]:
    return {name: count for name, count in (await plane.stats()).rows.items() if count}


def test_prompts_go_round_and_leave_nothing_behind(run: Callable[[Body], None]) -> None:
    async def body(plane: DataPlane) -> None:
        async with ReplayBuffer(plane, "p", CONFIG) as buffer:
            await buffer.add(["a", "b", "c"], 2)
            a, b, c = await buffer.lease(3, version=0, timeout_s=5)
            await settle(plane, c, 0, rows(7.0, 8.0), tags=[{"len": 3}, {"len": 4}])
            await settle(plane, c, 1, rows(9.0))
            await settle_all(plane, b)
            meta = await buffer.take(2, version=0, timeout_s=5)
            assert meta.keys == ("b/0/0", "b/1/0", "c/0/0", "c/0/1", "c/1/0")
            assert (await plane.get(meta, ["score"])).dense("score").values.tolist() == [0.0, 1.0, 7.0, 8.0, 9.0]
            await settle_all(plane, a)
            assert meta.tag_values("version") == [0] * len(meta)
            rest = await buffer.take(1, version=1, timeout_s=5)
            uids = sorted({str(u) for u in (*meta.tag_values("uid"), *rest.tag_values("uid"))})
            assert uids == ["a", "b", "c"]
            assert buffer.counts()["taken"] == 3
            await buffer.commit(uids)
        assert await left(plane) == {}

    run(body)


def test_tags_of_the_worker_are_kept(run: Callable[[Body], None]) -> None:
    async def body(plane: DataPlane) -> None:
        async with ReplayBuffer(plane, "p", CONFIG) as buffer:
            await buffer.add(["a"], 1)
            (lease,) = await buffer.lease(1, version=3, timeout_s=5)
            await settle(plane, lease, 0, rows(1.0, 2.0), tags=[{"len": 3}, {"len": 4, "version": 2}])
            meta = await buffer.take(1, version=3, timeout_s=5)
            assert meta.tag_values("len") == [3, 4]
            assert meta.tag_values("version") == [3, 2]

    run(body)


def test_a_failed_group_is_refilled_and_its_rows_are_gone(run: Callable[[Body], None]) -> None:
    async def body(plane: DataPlane) -> None:
        async with ReplayBuffer(plane, "p", CONFIG) as buffer:
            await buffer.add(["a"], 3)
            (first,) = await buffer.lease(1, version=0, timeout_s=5)
            await settle_all(plane, first, failed=1)
            (second,) = await buffer.lease(1, version=0, timeout_s=5)
            assert second.sessions == (3, 4, 5)
            await settle(plane, first, 0, rows(99.0))  # a straggler of the first attempt
            await settle_all(plane, second)
            meta = await buffer.take(1, version=0, timeout_s=5)
            assert meta.keys == ("a/3/0", "a/4/0", "a/5/0")
            await buffer.commit(["a"])
        assert await left(plane) == {}

    run(body)


def test_a_late_straggler_is_cleared(run: Callable[[Body], None]) -> None:
    async def body(plane: DataPlane) -> None:
        async with ReplayBuffer(plane, "p", CONFIG) as buffer:
            await buffer.add(["a"], 1)
            (lease,) = await buffer.lease(1, version=0, timeout_s=5)
            await settle_all(plane, lease)
            await buffer.take(1, version=0, timeout_s=5)
            await buffer.commit(["a"])
            await settle(plane, lease, 0, rows(1.0))
            for _ in range(100):
                if not await left(plane):
                    break
                await asyncio.sleep(0.02)
        assert await left(plane) == {}

    run(body)


def test_a_lease_that_ends_is_seen_without_any_other_event(run: Callable[[Body], None]) -> None:
    async def body(plane: DataPlane) -> None:
        config = ReplayConfig(groups_per_version=1, on_failure="accept_partial", min_sessions=1, lease_s=0.2)
        async with ReplayBuffer(plane, "p", config) as buffer:
            await buffer.add(["a"], 2)
            (lease,) = await buffer.lease(1, version=0, timeout_s=5)
            await settle(plane, lease, 1, rows(1.0))
            meta = await buffer.take(1, version=0, timeout_s=5)
            assert meta.keys == ("a/1/0",)

    run(body)


def test_a_group_that_failed_stops_the_trainer_until_it_is_discarded(run: Callable[[Body], None]) -> None:
    async def body(plane: DataPlane) -> None:
        config = ReplayConfig(groups_per_version=2, on_failure="fail")
        async with ReplayBuffer(plane, "p", config) as buffer:
            await buffer.add(["a", "b"], 2)
            a, b = await buffer.lease(2, version=0, timeout_s=5)
            taking = asyncio.ensure_future(buffer.take(1, version=0, timeout_s=20))
            await asyncio.sleep(0.02)
            await settle_all(plane, a, failed=2)
            with pytest.raises(RolloutError, match="no luck"):
                await taking
            assert buffer.failed() == {"a": "session 1: no luck"}
            await buffer.discard(["a"])
            await settle_all(plane, b)
            assert set((await buffer.take(1, version=0, timeout_s=5)).tag_values("uid")) == {"b"}

    run(body)


def test_every_wait_has_a_deadline_and_says_how_things_stand(run: Callable[[Body], None]) -> None:
    async def body(plane: DataPlane) -> None:
        async with ReplayBuffer(plane, "p", CONFIG) as buffer:
            with pytest.raises(PlaneTimeout, match=r"no prompt of 2 may start within 0\.05 s"):
                await buffer.lease(2, version=0, timeout_s=0.05)
            await buffer.add(["a", "b"], 1)
            await buffer.lease(1, version=0, timeout_s=5)
            with pytest.raises(PlaneTimeout, match=r"fewer than 1.*'pending': 1, 'running': 1"):
                await buffer.take(1, version=0, timeout_s=0.05)

    run(body)


def test_producers_wait_until_the_trainer_has_come_far_enough(run: Callable[[Body], None]) -> None:
    async def body(plane: DataPlane) -> None:
        async with ReplayBuffer(plane, "p", ReplayConfig(groups_per_version=1, max_staleness=0)) as buffer:
            await buffer.add(["a", "b"], 1)
            (first,) = await buffer.lease(5, version=0, timeout_s=5)
            with pytest.raises(PlaneTimeout, match="'pending': 1, 'running': 1"):
                await buffer.lease(5, version=0, timeout_s=0.05)
            waiting = asyncio.ensure_future(buffer.take(1, version=0, timeout_s=5))
            await settle_all(plane, first)
            await waiting
            (second,) = await buffer.lease(5, version=1, timeout_s=5)
            assert (second.uid, second.version) == ("b", 1)

    run(body)


def test_a_prompt_that_comes_free_again_wakes_who_waits_for_one(run: Callable[[Body], None]) -> None:
    async def body(plane: DataPlane) -> None:
        async with ReplayBuffer(plane, "p", CONFIG) as buffer:
            await buffer.add(["a"], 1)
            (first,) = await buffer.lease(1, version=0, timeout_s=5)
            waiting = asyncio.ensure_future(buffer.lease(1, version=0, timeout_s=20))
            await settle_all(plane, first, failed=1)
            assert (await waiting)[0].attempt == 1

    run(body)


def test_a_restart_finds_everything_again(run: Callable[[Body], None]) -> None:
    async def body(plane: DataPlane) -> None:
        async with ReplayBuffer(plane, "p", CONFIG) as buffer:
            await buffer.add(["taken", "done", "half", "waiting"], 2)
            taken, done, half = await buffer.lease(3, version=0, timeout_s=5)
            await settle_all(plane, taken)
            await buffer.take(1, version=0, timeout_s=5)
            await settle(plane, half, 0, rows(5.0))
        await settle_all(plane, done)  # while nobody owns the buffer
        async with ReplayBuffer(plane, "p", CONFIG) as buffer:
            assert buffer.counts() == {"pending": 1, "running": 1, "finished": 2, "failed": 0, "taken": 0}
            meta = await buffer.take(2, version=0, timeout_s=5)
            assert sorted({str(u) for u in meta.tag_values("uid")}) == ["done", "taken"]
            await settle(plane, half, 1, rows(6.0))
            meta = await buffer.take(1, version=1, timeout_s=5)
            assert (await plane.get(meta, ["score"])).dense("score").values.tolist() == [5.0, 6.0]
            await buffer.commit(["taken", "done", "half"])
            assert [lease.uid for lease in await buffer.lease(9, version=1, timeout_s=5)] == ["waiting"]

    run(body)


def test_a_restart_in_the_middle_of_a_refill_does_not_mix_attempts(run: Callable[[Body], None]) -> None:
    async def body(plane: DataPlane) -> None:
        async with ReplayBuffer(plane, "p", CONFIG) as buffer:
            await buffer.add(["a"], 2)
            (lease,) = await buffer.lease(1, version=0, timeout_s=5)
            await settle_all(plane, lease, failed=1)
            (again,) = await buffer.lease(1, version=0, timeout_s=5)
            await settle(plane, again, again.sessions[0], rows(1.0))
        old: KVBatchMeta = await plane.put("p", ["a/1/0"], rows(-1.0), tags=[{"uid": "a", "attempt": 0, "version": 0}])
        await plane.put(
            "p/settled", ["a/0/1"], tags=[{"uid": "a", "attempt": 0, "session": 1, "rows": 1, "reason": ""}]
        )
        async with ReplayBuffer(plane, "p", CONFIG) as buffer:
            assert old.keys[0] not in (await plane.list_rows("p")).keys
            await settle(plane, again, again.sessions[1], rows(2.0))
            assert (await buffer.take(1, version=0, timeout_s=5)).keys == ("a/2/0", "a/3/0")

    run(body)


def test_settling_must_make_sense(run: Callable[[Body], None]) -> None:
    async def body(plane: DataPlane) -> None:
        lease = Lease("p", "a", 0, (0, 1), 0, 5.0)
        for session, data, error in ((0, None, ""), (0, rows(1.0), "broken"), (2, rows(1.0), ""), (0, rows(), "")):
            with pytest.raises(BatchError, match=f"Session {session} of 'a'"):
                await settle(plane, lease, session, data, error=error)
        with pytest.raises(BatchError, match="not open"):
            await ReplayBuffer(plane, "p", CONFIG).take(1, version=0, timeout_s=1)

    run(body)


def test_what_a_cancelled_caller_would_have_got_is_not_lost() -> None:
    class Slow(MemoryDataPlane):
        slow = False

        async def put(self, *args: object, **kwargs: object) -> KVBatchMeta:  # type: ignore[override]
            if self.slow:
                await asyncio.sleep(10)
            return await super().put(*args, **kwargs)  # type: ignore[arg-type]

    async def main() -> None:
        plane = Slow()
        async with ReplayBuffer(plane, "p", CONFIG) as buffer:
            await buffer.add(["a"], 1)
            plane.slow = True
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(buffer.lease(1, version=0, timeout_s=5), 0.05)
            plane.slow = False
            (lease,) = await buffer.lease(1, version=0, timeout_s=5)
            await settle_all(plane, lease)
            await asyncio.sleep(0.05)
            plane.slow = True
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(buffer.take(1, version=0, timeout_s=5), 0.05)
            plane.slow = False
            assert len(await buffer.take(1, version=0, timeout_s=5)) == 1

    asyncio.run(main())


def test_a_lost_plane_ends_every_wait() -> None:
    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client, ReplayBuffer(client, "p", CONFIG) as buffer:
            waits = [
                asyncio.ensure_future(buffer.take(1, version=0, timeout_s=20)),
                asyncio.ensure_future(buffer.lease(1, version=0, timeout_s=20)),
            ]
            await asyncio.sleep(0.05)
            plane.close()
            for wait in waits:
                async with asyncio.timeout(5):
                    with pytest.raises(PlaneLostError):
                        await wait

    with start_local_plane(TransferQueueConfig(num_storage_units=1, capacity_mb=8, segment_mb=1)) as plane:
        asyncio.run(main(plane))


WORKER = """
import asyncio, os, signal, sys
import msgspec
from rl_protocol import BatchData, dense
from rl_transferqueue import PlaneDescriptor, connect
from rl_transferqueue.groups import Lease
from rl_transferqueue.replay import settle

async def main():
    lease = msgspec.json.decode(sys.argv[2], type=Lease)
    client = await connect(PlaneDescriptor.from_json(sys.argv[1]))
    await settle(client, lease, lease.sessions[0], BatchData({"score": dense([1.0])}))
    await client.put(lease.partition, [f"a/{lease.sessions[1]}/0"], tags=[{"uid": "a", "attempt": 0}])  # half a session
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_a_worker_that_is_killed_leaves_nothing_in_the_batch(plane: LocalPlane) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            config = ReplayConfig(groups_per_version=1, lease_s=4.0)
            async with ReplayBuffer(client, "p", config) as buffer:
                await buffer.add(["a"], 2)
                (lease,) = await buffer.lease(1, version=0, timeout_s=5)
                arguments = ["-c", WORKER, plane.descriptor.to_json(), msgspec.json.encode(lease).decode()]
                worker = await asyncio.create_subprocess_exec(sys.executable, *arguments)
                assert await worker.wait() == -signal.SIGKILL
                (again,) = await buffer.lease(1, version=0, timeout_s=20)
                assert again.attempt == 1
                await settle_all(client, again)
                meta = await buffer.take(1, version=0, timeout_s=5)
                assert meta.keys == ("a/2/0", "a/3/0")
                assert (await client.list_rows("p")).keys == meta.keys
                await buffer.commit(["a"])
            assert await left(client) == {}

    asyncio.run(main())
