"""Conformance suite of ReplayBuffer: subclass it and override `open_plane` and `open_buffer`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal

import pytest

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import dense
from rl_protocol.errors import BatchError, PlaneTimeout, RolloutError
from rl_protocol.ports import DataPlane, Lease, ReplayBuffer, SessionResult, settle

_SOON_S, _NEVER_S = 60.0, 0.05
"""Deadlines of waits that end, and of waits that do not."""


@dataclass(frozen=True, kw_only=True)
class BufferSettings:
    """How the buffer of a test treats failures and staleness."""

    on_failure: Literal["fail", "refill", "accept_partial"] = "refill"
    """fail: a group with a failed session fails. refill: it starts again. accept_partial: it is
    finished if one session succeeded."""
    max_attempts: int = 3
    lease_s: float = 600.0
    groups_per_version: int = 2
    max_staleness: int = 1
    """Producers wait, so that no group is trained on that was started more versions before."""


def scores(*values: float) -> BatchData:
    """Trajectories with a column `score`."""
    return BatchData({"score": dense([float(value) for value in values])})


async def settle_all(plane: DataPlane, lease: Lease, *, failed: int = 0) -> None:
    """Settle every session of a lease, the first `failed` of them with an error.

    The score of a trajectory is its session number.
    """
    results = [
        SessionResult(lease, session, error="no luck") if i < failed else SessionResult(lease, session, rows=1)
        for i, session in enumerate(lease.sessions)
    ]
    good = lease.sessions[failed:]
    await settle(plane, results, scores(*good) if good else None)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition, at most a minute."""
    for _ in range(6000):
        if await condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("the condition does not hold after a minute")


async def holds(condition: Callable[[], bool]) -> bool:
    """The condition, for `until`."""
    return condition()


class ReplayBufferSuite:
    """Tests for a ReplayBuffer and the rows that it leaves in its plane."""

    def open_plane(self) -> AbstractAsyncContextManager[DataPlane]:
        """An empty plane, released when the context ends."""
        raise NotImplementedError

    def open_buffer(
        self, plane: DataPlane, partition: str, settings: BufferSettings
    ) -> AbstractAsyncContextManager[ReplayBuffer]:
        """A buffer of that partition; its groups and rows stay when the context ends."""
        raise NotImplementedError

    def run(
        self,
        body: Callable[[DataPlane, ReplayBuffer], Awaitable[None]],
        settings: BufferSettings | None = None,
        *,
        leaves: bool = True,
    ) -> None:
        """Open a buffer on a new plane and run a test body; `leaves` says whether rows may stay."""

        async def main() -> None:
            async with self.open_plane() as plane:
                async with self.open_buffer(plane, "p", settings or BufferSettings()) as buffer:
                    await asyncio.wait_for(body(plane, buffer), 2 * _SOON_S)
                assert leaves or not await _rows(plane)

        asyncio.run(main())

    def test_prompts_go_through_and_leave_nothing_behind(self) -> None:
        async def body(plane: DataPlane, buffer: ReplayBuffer) -> None:
            await buffer.add(["a", "b", "c"], 2)
            a, b, c = await buffer.lease(3, version=0, timeout_s=_SOON_S)
            assert [lease.uid for lease in (a, b, c)] == ["a", "b", "c"]
            assert (a.partition, a.attempt, a.sessions, a.version) == ("p", 0, (0, 1), 0)
            three = [SessionResult(c, 0, rows=2), SessionResult(c, 1, rows=1)]
            await settle(plane, three, scores(7, 8, 9), tags=[{"len": 3}, {"len": 4}, {"len": 5}])
            await settle_all(plane, b)
            meta = await buffer.take(2, version=0, timeout_s=_SOON_S)
            assert meta.keys == ("b/0/0", "b/1/0", "c/0/0", "c/0/1", "c/1/0")
            assert (await plane.get(meta, ["score"])).dense("score").values.tolist() == [0.0, 1.0, 7.0, 8.0, 9.0]
            assert meta.tag_values("version") == [0] * len(meta)
            await settle_all(plane, a)
            rest = await buffer.take(1, version=1, timeout_s=_SOON_S)
            assert set(rest.tag_values("uid")) == {"a"}
            assert buffer.counts() == {"pending": 0, "running": 0, "finished": 0, "failed": 0, "taken": 3}
            await buffer.commit(["b", "c"])
            assert [key.partition("/")[0] for key in (await plane.list_rows("p")).keys] == ["a", "a"]
            await buffer.commit(["a"])

        self.run(body, leaves=False)

    def test_named_prompts_are_leased_and_taken_apart_from_the_others(self) -> None:
        async def body(plane: DataPlane, buffer: ReplayBuffer) -> None:
            await buffer.add(["a", "b", "c"], 1)
            assert await buffer.pending({"c", "b", "x"}, timeout_s=_SOON_S) == ["b", "c"]
            (c,) = await buffer.lease(9, version=0, timeout_s=_SOON_S, uids={"c"})
            with pytest.raises(PlaneTimeout):
                await buffer.pending({"c"}, timeout_s=_NEVER_S)
            a, b = await buffer.lease(9, version=0, timeout_s=_SOON_S)
            assert (a.uid, b.uid, c.uid) == ("a", "b", "c")
            await settle_all(plane, a, failed=1)
            await settle_all(plane, b)
            await settle_all(plane, c)
            assert (await buffer.take(1, version=0, timeout_s=_SOON_S, uids={"c"})).keys == ("c/0/0",)
            await until(lambda: holds(lambda: buffer.counts()["failed"] == 1))
            with pytest.raises(RolloutError, match="'a'"):
                await buffer.take(1, version=0, timeout_s=_SOON_S)
            assert (await buffer.take(1, version=0, timeout_s=_SOON_S, uids=["b"])).keys == ("b/0/0",)
            await buffer.discard(["a"])
            await buffer.commit(["b", "c"])

        self.run(body, BufferSettings(on_failure="fail", groups_per_version=9), leaves=False)

    def test_a_take_that_waits_while_a_newer_version_is_named_takes_for_that_version(self) -> None:
        async def body(plane: DataPlane, buffer: ReplayBuffer) -> None:
            await buffer.add(["a", "b"], 1)
            (a,) = await buffer.lease(1, version=0, timeout_s=_SOON_S, uids={"a"})
            taking = asyncio.ensure_future(buffer.take(1, version=0, timeout_s=_SOON_S, uids={"a"}))
            await asyncio.sleep(0)
            await buffer.lease(1, version=1, timeout_s=_SOON_S, uids={"b"})
            await settle_all(plane, a)
            assert (await taking).keys == ("a/0/0",)
            with pytest.raises(BatchError):
                await buffer.take(1, version=0, timeout_s=_SOON_S, uids={"b"})

        self.run(body)

    def test_groups_that_are_added_together_may_have_sizes_of_their_own(self) -> None:
        async def body(plane: DataPlane, buffer: ReplayBuffer) -> None:
            await buffer.add(["a", "b", "c"], [3, 1, 2])
            leases = await buffer.lease(3, version=0, timeout_s=_SOON_S)
            assert [(lease.uid, len(lease.sessions)) for lease in leases] == [("a", 3), ("b", 1), ("c", 2)]
            for lease in leases:
                await settle_all(plane, lease)
            taken = await buffer.take(3, version=0, timeout_s=_SOON_S)
            assert [str(uid) for uid in taken.tag_values("uid")] == ["a", "a", "a", "b", "c", "c"]
            for sizes in ([1], [1, 0]):
                with pytest.raises(BatchError):
                    await buffer.add(["d", "e"], sizes)
            assert set(buffer.statuses()) == {"a", "b", "c"}
            await buffer.commit(["a", "b", "c"])

        self.run(body, BufferSettings(groups_per_version=9))

    def test_workers_of_one_group_settle_apart_and_in_any_order(self) -> None:
        async def body(plane: DataPlane, buffer: ReplayBuffer) -> None:
            await buffer.add(["a", "b"], 3)
            a, b = await buffer.lease(2, version=0, timeout_s=_SOON_S)
            assert buffer.unsettled() == {"a": (0, 1, 2), "b": (0, 1, 2)}
            assert list(buffer.statuses().items())[:2] == [("a", "running"), ("b", "running")]
            for session in (2, 0):
                await settle(plane, [SessionResult(a, session, rows=1)], scores(session))
            await settle_all(plane, b)
            assert (await buffer.take(1, version=0, timeout_s=_SOON_S)).tag_values("uid") == ["b"] * 3
            with pytest.raises(PlaneTimeout):
                await buffer.take(1, version=0, timeout_s=_NEVER_S)
            assert buffer.unsettled() == {"a": (1,)}
            await settle(plane, [SessionResult(a, 1, rows=1)], scores(1))
            assert (await buffer.take(1, version=0, timeout_s=_SOON_S)).keys == ("a/0/0", "a/1/0", "a/2/0")

        self.run(body)

    def test_tags_of_the_worker_win(self) -> None:
        async def body(plane: DataPlane, buffer: ReplayBuffer) -> None:
            await buffer.add(["a"], 1)
            (lease,) = await buffer.lease(1, version=3, timeout_s=_SOON_S)
            await settle(plane, [SessionResult(lease, 0, rows=2)], scores(1, 2), tags=[{"len": 3}, {"version": 2}])
            meta = await buffer.take(1, version=3, timeout_s=_SOON_S)
            assert [tag["version"] for tag in meta.tags] == [3, 2]
            assert [tag.get("len") for tag in meta.tags] == [3, None]

        self.run(body)

    def test_settling_twice_counts_once(self) -> None:
        async def body(plane: DataPlane, buffer: ReplayBuffer) -> None:
            await buffer.add(["a"], 2)
            (lease,) = await buffer.lease(1, version=0, timeout_s=_SOON_S)
            for _ in range(2):
                await settle(plane, [SessionResult(lease, 0, rows=1)], scores(0))
            with pytest.raises(PlaneTimeout):
                await buffer.take(1, version=0, timeout_s=_NEVER_S)
            await settle_all(plane, lease)
            assert (await buffer.take(1, version=0, timeout_s=_SOON_S)).keys == ("a/0/0", "a/1/0")

        self.run(body)

    def test_a_failed_group_starts_again_and_its_rows_are_gone(self) -> None:
        async def body(plane: DataPlane, buffer: ReplayBuffer) -> None:
            await buffer.add(["a"], 3)
            (first,) = await buffer.lease(1, version=0, timeout_s=_SOON_S)
            await settle_all(plane, first, failed=1)
            (second,) = await buffer.lease(1, version=0, timeout_s=_SOON_S)
            assert (second.attempt, second.sessions) == (1, (3, 4, 5))
            await settle(plane, [SessionResult(first, 0, rows=1)], scores(99))  # late: of the first attempt
            await settle_all(plane, second)
            assert (await buffer.take(1, version=0, timeout_s=_SOON_S)).keys == ("a/3/0", "a/4/0", "a/5/0")
            (failure,) = buffer.failures()
            assert (failure.uid, failure.attempt, failure.sessions, failure.outcome) == ("a", 0, 1, "retried")
            assert "no luck" in failure.reason
            assert not buffer.failures()
            await buffer.commit(["a"])

        self.run(body, leaves=False)

    def test_rows_that_arrive_after_the_commit_are_cleared(self) -> None:
        async def body(plane: DataPlane, buffer: ReplayBuffer) -> None:
            await buffer.add(["a"], 1)
            (lease,) = await buffer.lease(1, version=0, timeout_s=_SOON_S)
            await settle_all(plane, lease)
            await buffer.take(1, version=0, timeout_s=_SOON_S)
            await buffer.commit(["a"])
            await settle_all(plane, lease)
            await until(lambda: _is_empty(plane))

        self.run(body, leaves=False)

    def test_a_group_with_a_failed_session_is_finished_where_partial_groups_are_accepted(self) -> None:
        async def body(plane: DataPlane, buffer: ReplayBuffer) -> None:
            await buffer.add(["a"], 3)
            (lease,) = await buffer.lease(1, version=0, timeout_s=_SOON_S)
            await settle_all(plane, lease, failed=2)
            assert (await buffer.take(1, version=0, timeout_s=_SOON_S)).keys == ("a/2/0",)
            assert [(one.sessions, one.outcome) for one in buffer.failures()] == [(2, "partial")]
            await buffer.commit(["a"])

        self.run(body, BufferSettings(on_failure="accept_partial"), leaves=False)

    def test_a_group_without_any_session_is_not_finished(self) -> None:
        async def body(plane: DataPlane, buffer: ReplayBuffer) -> None:
            await buffer.add(["a"], 2)
            (lease,) = await buffer.lease(1, version=0, timeout_s=_SOON_S)
            await settle_all(plane, lease, failed=2)
            (again,) = await buffer.lease(1, version=0, timeout_s=_SOON_S)
            assert again.attempt == 1

        self.run(body, BufferSettings(on_failure="accept_partial"))

    def test_a_lease_that_ends_is_seen_without_any_other_event(self) -> None:
        async def body(plane: DataPlane, buffer: ReplayBuffer) -> None:
            await buffer.add(["a"], 2)
            (lease,) = await buffer.lease(1, version=0, timeout_s=_SOON_S)
            await settle(plane, [SessionResult(lease, 1, rows=1)], scores(1))
            assert (await buffer.take(1, version=0, timeout_s=_SOON_S)).keys == ("a/1/0",)
            assert ["lease" in one.reason for one in buffer.failures()] == [True]

        self.run(body, BufferSettings(on_failure="accept_partial", lease_s=3.0))

    @pytest.mark.parametrize("settings", [BufferSettings(on_failure="fail"), BufferSettings(max_attempts=1)])
    def test_a_group_that_failed_stops_the_owner_until_it_is_discarded(self, settings: BufferSettings) -> None:
        async def body(plane: DataPlane, buffer: ReplayBuffer) -> None:
            await buffer.add(["a", "b"], 2)
            a, b = await buffer.lease(2, version=0, timeout_s=_SOON_S)
            taking = asyncio.ensure_future(buffer.take(1, version=0, timeout_s=_SOON_S))
            await settle_all(plane, a, failed=2)
            with pytest.raises(RolloutError, match="no luck"):
                await taking
            assert list(buffer.failed()) == ["a"]
            assert [one.outcome for one in buffer.failures()] == ["failed"]
            with pytest.raises(BatchError):
                await buffer.discard(["a", "ghost"])
            assert list(buffer.failed()) == ["a"]
            await buffer.discard(["a"])
            await settle_all(plane, b)
            assert set((await buffer.take(1, version=0, timeout_s=_SOON_S)).tag_values("uid")) == {"b"}
            await buffer.commit(["b"])

        self.run(body, settings, leaves=False)

    def test_a_group_can_be_given_up_in_any_status_and_what_arrives_later_is_refused(self) -> None:
        async def body(plane: DataPlane, buffer: ReplayBuffer) -> None:
            uids = ["taken", "finished", "running", "pending", "kept"]
            await buffer.add(uids, 2)
            leases = {lease.uid: lease for lease in await buffer.lease(3, version=0, timeout_s=_SOON_S)}
            for uid in ("taken", "finished"):
                await settle_all(plane, leases[uid])
            await settle(plane, [SessionResult(leases["running"], 0, rows=1)], scores(0))
            await buffer.take(1, version=0, timeout_s=_SOON_S, uids={"taken"})
            there = {"pending": 2, "running": 1, "finished": 1, "failed": 0, "taken": 1}
            await until(lambda: holds(lambda: buffer.counts() == there))
            await buffer.discard(uids[:4])
            assert buffer.counts() == {"pending": 1, "running": 0, "finished": 0, "failed": 0, "taken": 0}
            assert not buffer.unsettled()
            assert not buffer.failures()
            assert not (await plane.list_rows("p")).keys
            await settle_all(plane, leases["running"])
            (kept,) = await buffer.lease(9, version=0, timeout_s=_SOON_S)
            await settle_all(plane, kept)
            taken = await buffer.take(1, version=0, timeout_s=_SOON_S)
            assert (kept.uid, taken.keys) == ("kept", ("kept/0/0", "kept/1/0"))

            async def only_the_kept_group() -> bool:
                return (await plane.list_rows("p")).keys == taken.keys

            await until(only_the_kept_group)
            await buffer.commit(["kept"])

        self.run(body, BufferSettings(groups_per_version=9), leaves=False)

    def test_every_wait_has_a_deadline_and_says_how_things_stand(self) -> None:
        async def body(plane: DataPlane, buffer: ReplayBuffer) -> None:
            del plane
            with pytest.raises(PlaneTimeout, match=r"0\.05 s"):
                await buffer.lease(2, version=0, timeout_s=0.05)
            await buffer.add(["a", "b"], 1)
            await buffer.lease(1, version=0, timeout_s=_SOON_S)
            with pytest.raises(PlaneTimeout, match=r"'pending': 1, 'running': 1"):
                await buffer.take(1, version=0, timeout_s=_NEVER_S)

        self.run(body)

    def test_producers_wait_until_the_trainer_has_come_far_enough(self) -> None:
        async def body(plane: DataPlane, buffer: ReplayBuffer) -> None:
            await buffer.add(["a", "b"], 1)
            (first,) = await buffer.lease(5, version=0, timeout_s=_SOON_S)
            with pytest.raises(PlaneTimeout, match="'pending': 1, 'running': 1"):
                await buffer.lease(5, version=0, timeout_s=_NEVER_S)
            await settle_all(plane, first)
            await buffer.take(1, version=0, timeout_s=_SOON_S)
            (second,) = await buffer.lease(5, version=1, timeout_s=_SOON_S)
            assert (second.uid, second.version) == ("b", 1)

        self.run(body, BufferSettings(groups_per_version=1, max_staleness=0))

    def test_a_prompt_that_starts_again_wakes_a_waiting_lease(self) -> None:
        async def body(plane: DataPlane, buffer: ReplayBuffer) -> None:
            await buffer.add(["a"], 1)
            (first,) = await buffer.lease(1, version=0, timeout_s=_SOON_S)
            waiting = asyncio.ensure_future(buffer.lease(1, version=0, timeout_s=_SOON_S))
            await settle_all(plane, first, failed=1)
            assert (await waiting)[0].attempt == 1

        self.run(body)

    def test_a_group_is_refused_as_a_whole_or_not_at_all(self) -> None:
        async def body(plane: DataPlane, buffer: ReplayBuffer) -> None:
            del plane
            await buffer.add(["a"], 1)
            for uids, size in ((["b", "a"], 1), (["b", "b"], 1), (["b"], 0)):
                with pytest.raises(BatchError):
                    await buffer.add(uids, size)
            with pytest.raises(BatchError):
                await buffer.commit(["a"])
            assert [lease.uid for lease in await buffer.lease(9, version=0, timeout_s=_SOON_S)] == ["a"]

        self.run(body)

    def test_clear_forgets_everything_and_the_same_names_start_at_their_first_attempt(self) -> None:
        async def body(plane: DataPlane, buffer: ReplayBuffer) -> None:
            await buffer.add(["running", "failed", "taken", "waiting"], 2)
            running, failed, taken = await buffer.lease(3, version=0, timeout_s=_SOON_S)
            await settle(plane, [SessionResult(running, 0, rows=1)], scores(0))
            await settle_all(plane, taken)
            await buffer.take(1, version=0, timeout_s=_SOON_S)
            await settle_all(plane, failed, failed=1)
            await until(lambda: holds(lambda: buffer.counts()["failed"] == 1))
            await buffer.clear()
            assert await _is_empty(plane)
            assert not any(buffer.counts().values())
            assert not buffer.failures()
            await buffer.add(["failed"], 2)
            (again,) = await buffer.lease(9, version=0, timeout_s=_SOON_S)
            assert (again.attempt, again.sessions) == (0, (0, 1))
            await settle_all(plane, again)
            assert (await buffer.take(1, version=0, timeout_s=_SOON_S)).keys == ("failed/0/0", "failed/1/0")

        self.run(body, BufferSettings(on_failure="fail", max_staleness=9))

    def test_a_session_settles_with_rows_or_with_an_error(self) -> None:
        async def body(plane: DataPlane, buffer: ReplayBuffer) -> None:
            del buffer
            lease = Lease("p", "a", 0, (0, 1), 0, 5.0)
            other = Lease("q", "a", 0, (0, 1), 0, 5.0)
            for results, data in (
                ([SessionResult(lease, 0)], None),
                ([SessionResult(lease, 0, rows=1, error="broken")], scores(1)),
                ([SessionResult(lease, 2, rows=1)], scores(1)),
                ([SessionResult(lease, 0, rows=1)], scores(1, 2)),
                ([SessionResult(lease, 0, rows=1), SessionResult(other, 1, rows=1)], scores(1, 2)),
            ):
                with pytest.raises(BatchError):
                    await settle(plane, results, data)
            assert not await _rows(plane)

        self.run(body)


async def _rows(plane: DataPlane) -> dict[str, int]:
    return {name: count for name, count in (await plane.stats()).rows.items() if count}


async def _is_empty(plane: DataPlane) -> bool:
    return not await _rows(plane)
