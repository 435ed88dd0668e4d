"""`ReplayBuffer`: its conformance suite on an in-memory plane and on a real one, and restarts."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

import msgspec
import pytest

from rl_protocol import BatchError, KVBatchMeta, PlaneLostError, PlaneTimeout, RLError, RolloutError
from rl_protocol.batch.kv_batch_meta import Scalar
from rl_protocol.ports import DataPlane, GroupFailure, Lease, RowChanges, SessionResult, settle
from rl_protocol.ports.replay import SETTLED_SUFFIX
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_protocol.testing.replay_suite import BufferSettings, ReplayBufferSuite, holds, scores, settle_all, until
from rl_transferqueue import LocalPlane, TransferQueueConfig, connect, start_local_plane
from rl_transferqueue.consume.prompt_groups import ReplayConfig
from rl_transferqueue.consume.replay_buffer import ReplayBuffer

CONFIG = ReplayConfig(groups_per_version=2, max_staleness=1)


async def left(plane: DataPlane) -> dict[str, int]:
    return {name: count for name, count in (await plane.stats()).rows.items() if count}


class TestReplayBufferInMemory(ReplayBufferSuite):
    @asynccontextmanager
    async def open_plane(self) -> AsyncGenerator[DataPlane]:
        yield MemoryDataPlane()

    def open_buffer(
        self, plane: DataPlane, partition: str, settings: BufferSettings
    ) -> AbstractAsyncContextManager[ReplayBuffer]:
        return ReplayBuffer(plane, partition, ReplayConfig(**asdict(settings)))

    def test_a_restart_finds_everything_again(self) -> None:
        async def main() -> None:
            async with self.open_plane() as plane:
                async with ReplayBuffer(plane, "p", CONFIG) as buffer:
                    await buffer.add(["taken", "done", "half", "waiting"], 2)
                    taken, done, half = await buffer.lease(3, version=0, timeout_s=60)
                    await settle_all(plane, taken)
                    await buffer.take(1, version=0, timeout_s=60)
                    await settle(plane, [SessionResult(half, 0, rows=1)], scores(5))
                await settle_all(plane, done)  # while no buffer is open
                async with ReplayBuffer(plane, "p", CONFIG) as buffer:
                    assert buffer.counts() == {"pending": 1, "running": 1, "finished": 2, "failed": 0, "taken": 0}
                    meta = await buffer.take(2, version=0, timeout_s=60)
                    assert sorted({str(u) for u in meta.tag_values("uid")}) == ["done", "taken"]
                    await settle(plane, [SessionResult(half, 1, rows=1)], scores(6))
                    meta = await buffer.take(1, version=1, timeout_s=60)
                    assert (await plane.get(meta, ["score"])).dense("score").values.tolist() == [5.0, 6.0]
                    await buffer.commit(["taken", "done", "half"])
                    assert [lease.uid for lease in await buffer.lease(9, version=1, timeout_s=60)] == ["waiting"]

        asyncio.run(main())

    def test_a_restart_begins_a_finished_group_again_that_has_lost_a_row(self) -> None:
        async def main() -> None:
            async with self.open_plane() as plane:
                async with ReplayBuffer(plane, "p", CONFIG) as buffer:
                    await buffer.add(["whole", "damaged"], 2)
                    for lease in await buffer.lease(2, version=0, timeout_s=60):
                        await settle_all(plane, lease)
                await plane.clear("p", ["damaged/1/0"])
                async with ReplayBuffer(plane, "p", replace(CONFIG, max_attempts=1)) as buffer:
                    assert buffer.statuses() == {"whole": "finished", "damaged": "pending"}
                    assert (await plane.list_rows("p")).keys == ("whole/0/0", "whole/1/0")
                    (again,) = await buffer.lease(1, version=0, timeout_s=60)
                    assert (again.uid, again.sessions) == ("damaged", (2, 3))
                    await settle_all(plane, again)
                    taken = await buffer.take(2, version=0, timeout_s=60)
                    assert set(taken.keys) == {"whole/0/0", "whole/1/0", "damaged/2/0", "damaged/3/0"}

        asyncio.run(main())

    @pytest.mark.parametrize("settled", [(0, 1, 2), (1, 2)], ids=["all", "some"])
    def test_an_error_after_the_rows_of_a_session_does_not_replace_them(self, settled: tuple[int, ...]) -> None:
        """A worker dies after it has settled sessions, and its caller settles an error for all."""
        config = replace(CONFIG, on_failure="accept_partial")

        async def main() -> None:
            async with self.open_plane() as plane:
                async with ReplayBuffer(plane, "p", config) as buffer:
                    await buffer.add(["a"], 3)
                    (lease,) = await buffer.lease(1, version=0, timeout_s=60)
                    for session in settled:
                        await settle(plane, [SessionResult(lease, session, rows=1)], scores(session))
                    await settle_all(plane, lease, failed=3)
                    await until(lambda: holds(lambda: buffer.statuses() == {"a": "finished"}))
                async with ReplayBuffer(plane, "p", config) as buffer:
                    taken = await buffer.take(1, version=0, timeout_s=60)
                    assert taken.keys == tuple(f"a/{session}/0" for session in settled)
                    await buffer.commit(["a"])
                assert await left(plane) == {}

        asyncio.run(main())

    def test_a_session_that_settled_before_the_clock_jumped_counts(self) -> None:
        now = 0.0

        class Late(MemoryDataPlane):
            lease: Lease | None = None

            async def watch(
                self, partition: str, *, since: int = 0, where: Mapping[str, Scalar] | None = None, timeout_s: float
            ) -> RowChanges:
                nonlocal now
                answer = await super().watch(partition, since=since, where=where, timeout_s=timeout_s)
                if self.lease is not None:  # after the answer, before the owner has it
                    lease, self.lease = self.lease, None
                    await settle(self, [SessionResult(lease, 1, rows=1)], scores(6))
                    now = 1e6
                return answer

        async def main() -> None:
            plane = Late()
            async with ReplayBuffer(plane, "p", CONFIG, clock=lambda: now) as buffer:
                await buffer.add(["a"], 2)
                (plane.lease,) = (lease,) = await buffer.lease(1, version=0, timeout_s=60)
                await settle(plane, [SessionResult(lease, 0, rows=1)], scores(5))
                await until(lambda: holds(lambda: buffer.statuses() != {"a": "running"}))
                assert (buffer.statuses(), buffer.failures()) == ({"a": "finished"}, [])

        asyncio.run(main())

    @pytest.mark.parametrize("cut", ["p", "p/groups"])
    def test_a_restart_completes_a_commit_that_was_interrupted(self, cut: str) -> None:
        class DyingPlane(MemoryDataPlane):
            dies = False

            async def clear(self, partition: str, keys: Sequence[str] | None = None, *, timeout_s: float = 60.0) -> int:
                if self.dies and partition == cut:
                    raise PlaneLostError("killed here")
                return await super().clear(partition, keys, timeout_s=timeout_s)

        async def main() -> None:
            plane = DyingPlane()
            async with ReplayBuffer(plane, "p", CONFIG) as buffer:
                await buffer.add(["trained", "other"], 2)
                for lease in await buffer.lease(2, version=0, timeout_s=60):
                    await settle_all(plane, lease)
                await buffer.take(1, version=0, timeout_s=60)
                plane.dies = True
                with pytest.raises(PlaneLostError):
                    await buffer.commit(["trained"])
            plane.dies = False
            async with ReplayBuffer(plane, "p", CONFIG) as buffer:
                assert buffer.statuses() == {"other": "finished"}
                assert (await plane.list_rows("p")).keys == ("other/0/0", "other/1/0")
                assert (await plane.list_rows("p/groups")).keys == ("other",)

        asyncio.run(main())

    def test_a_settlement_repeated_while_the_first_is_cleared_leaves_no_rows(self) -> None:
        class Repeating(MemoryDataPlane):
            late: Lease | None = None

            async def clear(self, partition: str, keys: Sequence[str] | None = None, *, timeout_s: float = 60.0) -> int:
                if partition == "p" + SETTLED_SUFFIX and self.late is not None:
                    lease, self.late = self.late, None
                    await settle_all(self, lease)
                return await super().clear(partition, keys, timeout_s=timeout_s)

        async def main() -> None:
            plane = Repeating()
            async with ReplayBuffer(plane, "p", CONFIG) as buffer:
                await buffer.add(["late", "other"], 2)
                late, other = await buffer.lease(2, version=0, timeout_s=60)
                await buffer.discard(["late"])
                plane.late = late
                await settle(plane, [SessionResult(late, 0, rows=1)], scores(0))
                await settle_all(plane, other)
                await buffer.take(1, version=0, timeout_s=60)
                assert plane.late is None, "nothing was repeated"
                assert (await plane.list_rows("p")).keys == ("other/0/0", "other/1/0")

        asyncio.run(main())

    def test_a_restart_in_the_middle_of_a_retry_does_not_mix_attempts(self) -> None:
        async def main() -> None:
            async with self.open_plane() as plane:
                async with ReplayBuffer(plane, "p", CONFIG) as buffer:
                    await buffer.add(["a"], 2)
                    (lease,) = await buffer.lease(1, version=0, timeout_s=60)
                    await settle_all(plane, lease, failed=1)
                    (again,) = await buffer.lease(1, version=0, timeout_s=60)
                    await settle(plane, [SessionResult(again, 2, rows=1)], scores(1))
                await settle(plane, [SessionResult(lease, 1, rows=1)], scores(-1))
                async with ReplayBuffer(plane, "p", CONFIG) as buffer:
                    assert "a/1/0" not in (await plane.list_rows("p")).keys
                    await settle(plane, [SessionResult(again, 3, rows=1)], scores(2))
                    assert (await buffer.take(1, version=0, timeout_s=60)).keys == ("a/2/0", "a/3/0")

        asyncio.run(main())


class TestReplayBuffer(TestReplayBufferInMemory):
    """On the plane of this package."""

    plane: LocalPlane

    @pytest.fixture(autouse=True)
    def shared(self, plane: LocalPlane) -> None:
        self.plane = plane

    @asynccontextmanager
    async def open_plane(self) -> AsyncGenerator[DataPlane]:
        async with await connect(self.plane.descriptor) as client:
            yield client


class SkipsFailedGroups(ReplayBuffer):
    async def take(self, count: int, *, version: int, timeout_s: float) -> KVBatchMeta:
        with suppress(RolloutError):
            return await super().take(count, version=version, timeout_s=timeout_s)
        await self.discard(list(self.failed()))
        return await super().take(count, version=version, timeout_s=timeout_s)


class KeepsRows(ReplayBuffer):
    async def commit(self, uids: Sequence[str]) -> None:
        self._book.forget(uids, "taken")


class KeepsRowsOfDiscardedGroups(ReplayBuffer):
    async def discard(self, uids: Sequence[str]) -> None:
        self._book.forget(uids)


class ForgetsFailures(ReplayBuffer):
    def failures(self) -> list[GroupFailure]:
        return []


class FinishesAtTheFirstSession(ReplayBuffer):
    async def _count(self, result: Any) -> None:
        await super()._count(replace(result, sessions=range(3)))


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (SkipsFailedGroups, "test_a_group_that_failed_stops_the_owner_until_it_is_discarded"),
        (KeepsRows, "test_prompts_go_through_and_leave_nothing_behind"),
        (KeepsRowsOfDiscardedGroups, "test_a_group_can_be_given_up_in_any_status_and_what_arrives_later_is_refused"),
        (ForgetsFailures, "test_a_lease_that_ends_is_seen_without_any_other_event"),
        (FinishesAtTheFirstSession, "test_workers_of_one_group_settle_apart_and_in_any_order"),
    ],
)
def test_what_breaks_the_port_fails_its_suite(broken: type[ReplayBuffer], test: str) -> None:
    class Broken(TestReplayBufferInMemory):
        def open_buffer(self, plane: DataPlane, partition: str, settings: BufferSettings) -> ReplayBuffer:
            return broken(plane, partition, ReplayConfig(**asdict(settings)))

    arguments = [BufferSettings(on_failure="fail", lease_s=1.0)] if "stops_the_owner" in test else []
    with pytest.raises((AssertionError, RLError, TimeoutError, pytest.fail.Exception)):
        getattr(Broken(), test)(*arguments)


def test_what_a_cancelled_caller_would_have_got_is_not_lost() -> None:
    class Slow(MemoryDataPlane):
        slow = False

        async def put(self, *args: object, **kwargs: object) -> KVBatchMeta:  # type: ignore[override]
            if self.slow:
                await asyncio.Event().wait()  # until it is cancelled
            return await super().put(*args, **kwargs)  # type: ignore[arg-type]

        async def list_rows(self, *args: object, **kwargs: object) -> KVBatchMeta:  # type: ignore[override]
            if self.slow:
                await asyncio.Event().wait()  # until it is cancelled
            return await super().list_rows(*args, **kwargs)  # type: ignore[arg-type]

    async def main() -> None:
        plane = Slow()
        async with ReplayBuffer(plane, "p", CONFIG) as buffer:
            await buffer.add(["a"], 1)
            plane.slow = True
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(buffer.lease(1, version=0, timeout_s=60), 0.05)
            plane.slow = False
            (lease,) = await buffer.lease(1, version=0, timeout_s=60)
            await settle_all(plane, lease)
            await until(lambda: holds(lambda: buffer.counts()["finished"] == 1))
            plane.slow = True
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(buffer.take(1, version=0, timeout_s=60), 0.05)
            plane.slow = False
            assert len(await buffer.take(1, version=0, timeout_s=60)) == 1

    asyncio.run(main())


def test_a_plane_that_answers_late_is_asked_again() -> None:
    class Late(MemoryDataPlane):
        late = 0

        async def watch(self, *args: Any, **kwargs: Any) -> RowChanges:
            if self.late:
                self.late -= 1
                raise PlaneTimeout("no answer within 1 s")
            return await super().watch(*args, **kwargs)

    async def main() -> None:
        plane = Late()
        async with ReplayBuffer(plane, "p", CONFIG) as buffer:
            plane.late = 2
            await buffer.add(["a"], 1)
            (lease,) = await buffer.lease(1, version=0, timeout_s=60)
            await settle_all(plane, lease)
            assert len(await buffer.take(1, version=0, timeout_s=60)) == 1
            assert plane.late == 0

    asyncio.run(main())


def test_groups_of_a_cancelled_take_go_to_one_that_waits() -> None:
    class Slow(MemoryDataPlane):
        listed: asyncio.Event | None = None

        async def list_rows(self, *args: Any, **kwargs: Any) -> KVBatchMeta:
            if self.listed is not None and not self.listed.is_set():
                self.listed.set()
                await asyncio.Event().wait()  # until it is cancelled
            return await super().list_rows(*args, **kwargs)

    async def main() -> None:
        plane = Slow()
        async with ReplayBuffer(plane, "p", CONFIG) as buffer:
            await buffer.add(["a"], 1)
            (lease,) = await buffer.lease(1, version=0, timeout_s=60)
            await settle_all(plane, lease)
            await until(lambda: holds(lambda: buffer.counts()["finished"] == 1))
            plane.listed = asyncio.Event()
            first = asyncio.create_task(buffer.take(1, version=0, timeout_s=60))
            await plane.listed.wait()
            second = asyncio.create_task(buffer.take(1, version=0, timeout_s=60))
            await asyncio.sleep(0)
            discarding = asyncio.create_task(buffer.discard(["a"]))
            await asyncio.sleep(0)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert (await second).keys == ("a/0/0",)
            await discarding
        assert await left(plane) == {}

    asyncio.run(main())


@pytest.mark.parametrize("how", ["commit", "discard", "clear"])
@pytest.mark.parametrize("cut", ["p/settled", "p", "p/groups"])
def test_a_group_whose_clearing_was_interrupted_is_cleared_by_the_next_call(how: str, cut: str) -> None:
    class Late(MemoryDataPlane):
        late = False

        async def clear(self, partition: str, keys: Sequence[str] | None = None, *, timeout_s: float = 60.0) -> int:
            if self.late and partition == cut:
                self.late = False
                raise PlaneTimeout("no answer within 1 s")
            return await super().clear(partition, keys, timeout_s=timeout_s)

    async def main() -> None:
        plane = Late()
        async with ReplayBuffer(plane, "p", CONFIG) as buffer:
            await buffer.add(["a", "b"], 1)
            for lease in await buffer.lease(2, version=0, timeout_s=60):
                await settle_all(plane, lease)
            assert len(await buffer.take(1, version=0, timeout_s=60)) == 1
            await until(lambda: holds(lambda: buffer.counts()["finished"] == 1))
            plane.late = True
            calls = {"commit": buffer.commit, "discard": buffer.discard}
            with pytest.raises(PlaneTimeout):
                await (calls[how](["a"]) if how in calls else buffer.clear())
            assert "a" not in buffer.statuses()
            await buffer.add(["a"], 1)
            others = () if how == "clear" else ("b/0/0",)
            assert (await plane.list_rows("p")).keys == others
            assert set((await plane.list_rows("p/groups")).keys) == {"a", *(key[0] for key in others)}
            (again,) = await buffer.lease(1, version=0, timeout_s=60)
            await settle_all(plane, again)
            taken = await buffer.take(1 + len(others), version=0, timeout_s=60)
            assert set(taken.keys) == {"a/0/0", *others}

    asyncio.run(main())


@pytest.mark.parametrize("what", ["clear", "put"])
def test_a_session_that_can_not_be_counted_in_time_is_counted_again(what: str) -> None:
    """The owner's save of what has settled, or its clearing of a failed attempt, is late once."""

    class Late(MemoryDataPlane):
        late = ""

        async def put(self, partition: str, *args: Any, **kwargs: Any) -> KVBatchMeta:
            self._look("put" if partition == "p/groups" else "")
            return await super().put(partition, *args, **kwargs)

        async def clear(self, *args: Any, **kwargs: Any) -> int:
            self._look("clear")
            return await super().clear(*args, **kwargs)

        def _look(self, call: str) -> None:
            if call and self.late == call:
                self.late = ""
                raise PlaneTimeout("no answer within 1 s")

    async def main() -> None:
        plane = Late()
        async with ReplayBuffer(plane, "p", CONFIG) as buffer:
            await buffer.add(["a"], 2)
            (lease,) = await buffer.lease(1, version=0, timeout_s=60)
            plane.late = what
            await settle(plane, [SessionResult(lease, 0, rows=1)], scores(0))
            await settle(plane, [SessionResult(lease, 1, error="broken")])
            await until(lambda: holds(lambda: not plane.late))
            (again,) = await buffer.lease(1, version=0, timeout_s=60)
            assert again.sessions == (2, 3)
            await settle_all(plane, again)
            assert set((await buffer.take(1, version=0, timeout_s=60)).keys) == {"a/2/0", "a/3/0"}

    asyncio.run(main())


def test_prompts_are_looked_up_however_they_are_given() -> None:
    class Prompts(list[str]):
        def __contains__(self, uid: object) -> bool:
            raise AssertionError("each of many prompts is looked for in a list of all")

    async def main() -> None:
        plane, uids = MemoryDataPlane(), Prompts(["a", "b"])
        async with ReplayBuffer(plane, "p", CONFIG) as buffer:
            await buffer.add(["a", "b", "c"], 1)
            assert await buffer.pending(uids, timeout_s=60) == ["a", "b"]
            for lease in await buffer.lease(9, version=0, timeout_s=60, uids=uids):
                await settle_all(plane, lease)
            assert len(await buffer.take(2, version=0, timeout_s=60, uids=uids)) == 2
            with pytest.raises(BatchError, match="at least 1 group; got 0"):
                await buffer.lease(0, version=0, timeout_s=60)

    asyncio.run(main())


def test_prompts_that_join_while_a_take_waits_count() -> None:
    async def main() -> None:
        plane, uids = MemoryDataPlane(), {"a"}
        async with ReplayBuffer(plane, "p", CONFIG) as buffer:
            await buffer.add(["a", "b"], 1)
            leases = {lease.uid: lease for lease in await buffer.lease(2, version=0, timeout_s=60)}
            taking = asyncio.create_task(buffer.take(1, version=0, timeout_s=60, uids=uids))
            await asyncio.sleep(0)
            uids.add("b")
            await settle_all(plane, leases["b"])
            assert (await taking).tag_values("uid") == ["b"]

    asyncio.run(main())


def test_a_lost_plane_ends_every_wait() -> None:
    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client, ReplayBuffer(client, "p", CONFIG) as buffer:
            waits = [
                asyncio.ensure_future(buffer.take(1, version=0, timeout_s=60)),
                asyncio.ensure_future(buffer.lease(1, version=0, timeout_s=60)),
            ]
            await asyncio.sleep(0.05)
            plane.close()
            for wait in waits:
                async with asyncio.timeout(60):
                    with pytest.raises(PlaneLostError):
                        await wait

    with start_local_plane(TransferQueueConfig(num_storage_units=1, capacity_mb=8, segment_mb=1)) as plane:
        asyncio.run(main(plane))


WORKER = """
import asyncio, os, signal, sys
import msgspec
from rl_protocol import BatchData, dense
from rl_protocol.ports import Lease, SessionResult, settle
from rl_transferqueue import PlaneDescriptor, connect

async def main():
    lease = msgspec.json.decode(sys.argv[2], type=Lease)
    client = await connect(PlaneDescriptor.from_json(sys.argv[1]))
    await settle(client, [SessionResult(lease, lease.sessions[0], rows=1)], BatchData({"score": dense([1.0])}))
    await client.put(lease.partition, [f"a/{lease.sessions[1]}/0"], tags=[{"uid": "a", "attempt": 0}])  # half a session
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_a_worker_that_is_killed_leaves_nothing_in_the_batch(plane: LocalPlane) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            config = ReplayConfig(groups_per_version=1, lease_s=0.1)
            now = 0.0
            async with ReplayBuffer(client, "p", config, clock=lambda: now) as buffer:
                await buffer.add(["a"], 2)
                (lease,) = await buffer.lease(1, version=0, timeout_s=60)
                arguments = ["-c", WORKER, plane.descriptor.to_json(), msgspec.json.encode(lease).decode()]
                worker = await asyncio.create_subprocess_exec(sys.executable, *arguments)
                assert await worker.wait() == -signal.SIGKILL
                now = 1.0  # the lease ends
                (again,) = await buffer.lease(1, version=0, timeout_s=60)
                assert again.attempt == 1
                await settle_all(client, again)
                meta = await buffer.take(1, version=0, timeout_s=60)
                assert meta.keys == ("a/2/0", "a/3/0")
                assert (await client.list_rows("p")).keys == meta.keys
                await buffer.commit(["a"])
            assert await left(client) == {}

    asyncio.run(main())
