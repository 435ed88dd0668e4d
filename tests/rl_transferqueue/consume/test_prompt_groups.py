"""The states of prompt groups, in fixed cases and random sequences of operations."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rl_protocol import BatchError, ConfigError, RolloutError
from rl_protocol.ports import Lease
from rl_transferqueue.consume.prompt_groups import Group, GroupBook, ReplayConfig


def book(sizes: dict[str, int] | None = None, *, per: int = 2, **settings: object) -> GroupBook:
    out = GroupBook(ReplayConfig(groups_per_version=per, **settings))  # type: ignore[arg-type]
    for uid, size in (sizes or {}).items():
        out.add([uid], size)
    return out


def settled(b: GroupBook, uid: str, attempt: int, session: int, rows: int, reason: str = "") -> bool:
    """Settle one session; whether it was in time."""
    late = b.settle(uid, attempt, [session], rows, reason)
    assert late in ([], [session])
    return not late


def settle_all(b: GroupBook, lease: Lease, failed: int = 0) -> None:
    for i, session in enumerate(lease.sessions):
        assert settled(b, lease.uid, lease.attempt, session, 0 if i < failed else 1, "broken" if i < failed else "")


def uids(groups: list[Group] | None) -> list[str]:
    assert groups is not None
    return [group.uid for group in groups]


# Fixed cases.
def test_a_group_is_taken_whole_and_the_oldest_go_first() -> None:
    b = book({"a": 2, "b": 1, "c": 1}, per=1, max_staleness=5)
    first, second, third = b.start(9, 0, 0.0)
    settle_all(b, third)
    assert settled(b, "a", 0, 0, 3)
    assert b.counts() == {"pending": 0, "running": 2, "finished": 1, "failed": 0, "taken": 0}
    settle_all(b, second)
    assert settled(b, "a", 0, 1, 1)
    taken = b.take(2, 0)
    assert uids(taken) == ["a", "b"]
    assert taken is not None
    assert taken[0].settled == {0: 3, 1: 1}
    assert b.take(2, 0) is None
    assert uids(b.take(1, 0)) == ["c"]
    b.forget(["a", "c"], "taken")
    assert list(b.groups) == ["b"]
    assert first.sessions == (0, 1)


def test_refill_restarts_with_other_sessions_and_refuses_late_ones() -> None:
    b = book({"a": 2}, on_failure="refill")
    (lease,) = b.start(1, 0, 0.0)
    settle_all(b, lease, failed=1)
    assert (b.counts()["pending"], b.abandoned) == (1, [("a", 0)])
    (again,) = b.start(1, 0, 0.0)
    assert (again.attempt, again.sessions) == (1, (2, 3))
    assert not settled(b, "a", 0, 1, 5)
    assert not settled(b, "a", 1, 0, 5)
    settle_all(b, again)
    assert uids(b.take(1, 0)) == ["a"]


def test_after_the_last_attempt_a_group_is_failed_and_take_says_so_until_it_is_discarded() -> None:
    b = book({"a": 1, "b": 1}, on_failure="refill", max_attempts=2)
    for _ in range(2):
        lease = b.start(1, 0, 0.0)[0]
        settle_all(b, lease, failed=1)
    settle_all(b, b.start(1, 0, 0.0)[0])
    with pytest.raises(RolloutError, match=r"'a', in attempt 2: session 1: broken\. Set .*max_attempts"):
        b.take(1, 0)
    with pytest.raises(BatchError, match="'a' is failed, not taken"):
        b.forget(["a"], "taken")
    b.forget(["a"], "failed")
    assert uids(b.take(1, 0)) == ["b"]


def test_fail_fails_at_the_first_broken_session_once_all_have_settled() -> None:
    b = book({"a": 3}, on_failure="fail")
    (lease,) = b.start(1, 0, 0.0)
    assert settled(b, "a", 0, 0, 0, "boom")
    assert b.counts()["running"] == 1
    assert settled(b, "a", 0, 1, 1)
    assert settled(b, "a", 0, 2, 1)
    assert b.counts()["failed"] == 1
    assert b.abandoned == []
    assert lease.attempt == 0


@pytest.mark.parametrize(("failed", "status"), [(0, "finished"), (1, "finished"), (2, "pending"), (3, "pending")])
def test_accept_partial_takes_k_good_sessions(failed: int, status: str) -> None:
    b = book({"a": 3}, on_failure="accept_partial", min_sessions=2)
    settle_all(b, b.start(1, 0, 0.0)[0], failed=failed)
    assert b.groups["a"].status == status
    assert len(b.groups["a"].good) == (3 - failed if status == "finished" else 0)


def test_a_lease_ends_and_the_policy_decides() -> None:
    for policy, status in (("fail", "failed"), ("refill", "pending"), ("accept_partial", "finished")):
        b = book({"a": 2}, on_failure=policy, lease_s=10.0)
        b.start(1, 0, 5.0)
        settled(b, "a", 0, 1, 1)
        assert b.next_expiry() == 15.0
        b.expire(14.9)
        assert b.groups["a"].status == "running"
        b.expire(15.0)
        assert b.groups["a"].status == status
        assert "sessions [0]" in b.groups["a"].reason
        assert b.next_expiry() is None
        assert settled(b, "a", 0, 0, 1) is False
        assert settled(b, "a", 0, 1, 1) is (policy != "refill")


def test_settling_twice_counts_once() -> None:
    b = book({"a": 2})
    b.start(1, 0, 0.0)
    assert settled(b, "a", 0, 0, 2)
    assert settled(b, "a", 0, 0, 2)
    assert b.counts()["running"] == 1
    assert settled(b, "a", 0, 1, 2)
    b.take(1, 0)
    assert settled(b, "a", 0, 1, 2)
    assert b.groups["a"].settled == {0: 2, 1: 2}


def test_sessions_that_ended_alike_settle_together_and_only_late_ones_are_named() -> None:
    b = book({"a": 4})
    b.start(1, 0, 0.0)
    assert b.settle("a", 0, [1, 2], 0, "boom") == []
    assert b.groups["a"].reason == "session 2: boom"
    assert b.settle("a", 0, [0, 1, 7], 2) == [7], "1 is settled already, and 7 is of another attempt"
    assert b.groups["a"].settled == {0: 2, 1: 0, 2: 0}, "the first result of a session counts"
    assert b.groups["a"].row_keys == ["a/0/0", "a/0/1"]
    assert b.settle("a", 0, [3, 9], 1) == [9]
    assert (b.groups["a"].status, b.groups["a"].attempt) == ("pending", 1)
    assert b.settle("a", 0, [0, 3], 1) == [0, 3], "the attempt is over"


def test_drop_refills_what_is_too_old() -> None:
    b = book({"a": 1, "b": 1}, when_stale="drop", max_staleness=1, per=1)
    old, new = b.start(1, 0, 0.0)[0], b.start(1, 2, 0.0)[0]
    settle_all(b, old)
    settle_all(b, new)
    assert uids(b.take(1, 2)) == ["b"]
    assert (b.counts()["pending"], b.abandoned) == (1, [("a", 0)])
    assert "too old for version 2" in b.groups["a"].reason


def test_wait_starts_only_what_will_be_in_time() -> None:
    b = book({str(i): 1 for i in range(9)}, when_stale="wait", max_staleness=1, per=2)
    first = b.start(9, 0, 0.0)
    assert len(first) == 4  # two for version 0, two for version 1
    assert b.start(9, 0, 0.0) == []
    for lease in first:
        settle_all(b, lease)
    assert uids(b.take(2, 0)) == ["0", "1"]
    # A group started with version 0 would be trained on by version 2, which is too late.
    assert b.start(9, 0, 0.0) == []
    assert len(b.start(9, 1, 0.0)) == 2


def test_wait_holds_the_trainer_back_for_one_that_would_be_too_old_later() -> None:
    b = book({"slow": 1, "x": 1, "y": 1, "z": 1}, when_stale="wait", max_staleness=1, per=2)
    slow, *rest = b.start(9, 0, 0.0)
    for lease in rest:
        settle_all(b, lease)
    assert uids(b.take(2, 0)) == ["x", "y"]  # slow can still be taken at version 1
    more = b.start(9, 1, 0.0)
    assert more == []
    b.add(["w"], 1)
    (late,) = b.start(9, 1, 0.0)[:1]
    settle_all(b, late)
    assert b.take(2, 1) is None  # z and w are ready, but slow would be too old at version 2
    settle_all(b, slow)
    assert uids(b.take(2, 1)) == ["slow", "z"]


def test_what_was_taken_and_not_committed_is_finished_after_a_restore() -> None:
    b = book({"a": 1})
    settle_all(b, b.start(1, 0, 0.0)[0])
    b.take(1, 0)
    again = book()
    again.restore(b.groups["a"])
    assert uids(again.take(1, 0)) == ["a"]
    again.add(["b"], 1)
    assert again.groups["b"].order > again.groups["a"].order


@pytest.mark.parametrize(
    ("name", "value"),
    [("groups_per_version", 0), ("max_staleness", -1), ("min_sessions", 0), ("max_attempts", 0), ("lease_s", 0.0)],
)
def test_settings_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"ReplayConfig\.{name}"):
        ReplayConfig(**({"groups_per_version": 1} | {name: value}))  # type: ignore[arg-type]


def test_misuse_is_refused() -> None:
    b = book({"a": 1})
    with pytest.raises(BatchError, match="'a'"):
        b.add(["a"], 1)
    with pytest.raises(BatchError, match="0 sessions"):
        b.add(["b"], 0)
    with pytest.raises(BatchError, match="'c'"):
        b.add(["b", "c", "c"], 1)
    assert list(b.groups) == ["a"]
    b.start(1, 3, 0.0)
    with pytest.raises(BatchError, match="never decrease"):
        b.take(1, 2)
    with pytest.raises(BatchError, match="not there"):
        b.forget(["ghost"], "taken")
    with pytest.raises(BatchError, match="at least 1 group; got 0"):
        b.start(0, 3, 0.0)


# Random sequences.
class GroupLife(RuleBasedStateMachine):
    """Random producers, and a trainer that takes `groups_per_version` groups per version."""

    policy = "refill"
    when = "wait"

    def __init__(self) -> None:
        super().__init__()
        self.config = ReplayConfig(
            groups_per_version=2,
            max_staleness=1,
            when_stale=self.when,  # type: ignore[arg-type]
            on_failure=self.policy,  # type: ignore[arg-type]
            min_sessions=2,
            max_attempts=3,
            lease_s=10.0,
        )
        self.book = GroupBook(self.config)
        self.leases: list[Lease] = []
        self.now = 0.0
        self.version = 0
        self.batches = 0
        self.added = 0
        self.gone = 0

    @rule(size=st.integers(1, 3))
    def add(self, size: int) -> None:
        self.book.add([f"g{self.added}"], size)
        self.added += 1

    @rule(count=st.integers(1, 4), lag=st.integers(0, 1))
    def start(self, count: int, lag: int) -> None:
        leases = self.book.start(count, max(0, self.version - lag), self.now)
        used = {(old.uid, session) for old in self.leases for session in old.sessions}
        assert not used & {(new.uid, session) for new in leases for session in new.sessions}
        self.leases += leases

    @rule(data=st.data(), rows=st.integers(0, 2))
    def settle(self, data: st.DataObject, rows: int) -> None:
        if self.leases:
            lease = data.draw(st.sampled_from(self.leases))
            session = data.draw(st.sampled_from(lease.sessions))
            group = self.book.groups.get(lease.uid)
            before, attempt = (dict(group.settled), group.attempt) if group else ({}, -1)
            counted = settled(self.book, lease.uid, lease.attempt, session, rows, "boom")
            if not counted and group:
                assert group.settled == before
            if attempt != lease.attempt:
                assert not counted

    @rule(count=st.integers(3, 6), lucky=st.booleans())
    def a_burst(self, count: int, lucky: bool) -> None:
        for _ in range(count):
            self.add(1)
        self.start(count, 0)
        for lease in self.leases[-3 if lucky else 0 :]:
            for session in lease.sessions:
                settled(self.book, lease.uid, lease.attempt, session, 1)
        self.take(2)

    @rule(seconds=st.floats(0, 12))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.book.expire(self.now)
        assert (self.book.next_expiry() or self.now + 1) > self.now

    @rule(count=st.integers(1, 2))
    def take(self, count: int) -> None:
        count = min(count, 2 - self.batches)
        if self.book.counts()["failed"]:
            with pytest.raises(RolloutError):
                self.book.take(count, self.version)
            return
        taken = self.book.take(count, self.version)
        if taken is None:
            return
        assert len(taken) == count
        last = max((g.version, g.order) for g in taken)
        assert not [g for g in self.book.groups.values() if g.status == "finished" and (g.version, g.order) < last]
        for group in taken:
            assert 0 <= self.version - group.version <= self.config.max_staleness
            need = self.config.min_sessions if self.policy == "accept_partial" else group.size
            assert len(group.good) >= min(need, group.size)
            assert set(group.good) <= set(group.sessions)
        self.book.forget([g.uid for g in taken], "taken")
        self.gone += count
        self.batches += count
        if self.batches == 2:
            self.version, self.batches = self.version + 1, 0

    @rule()
    def discard(self) -> None:
        failed = [g.uid for g in self.book.groups.values() if g.status == "failed"]
        self.book.forget(failed, "failed")
        self.gone += len(failed)

    @precondition(lambda self: self.book.groups)
    @rule(which=st.integers(0, 9))
    def give_up(self, which: int) -> None:
        group = list(self.book.groups.values())[which % len(self.book.groups)]
        assert self.book.forget([group.uid]) == [group]
        assert not settled(self.book, group.uid, group.attempt, group.sessions[0], 1)
        self.gone += 1

    @invariant()
    def every_group_is_somewhere(self) -> None:
        assert sum(self.book.counts().values()) + self.gone == self.added
        for group in self.book.groups.values():
            assert group.attempt < self.config.max_attempts
            if group.status == "finished":
                assert group.good
            if group.status == "failed":
                assert group.reason
            if self.when == "wait":
                assert "too old" not in group.reason

    def teardown(self) -> None:
        """Settle the open sessions, then check that all other groups finish without a timeout."""
        self.discard()
        for _ in range(4 * (self.added + 2)):
            for lease in [*self.leases, *self._lease_all()]:
                for session in lease.sessions:
                    settled(self.book, lease.uid, lease.attempt, session, 1)
            self.discard()
            left = self.added - self.gone
            if left >= 2 - self.batches:
                self.take(2 - self.batches)
        assert self.added - self.gone < 2

    def _lease_all(self) -> list[Lease]:
        before = len(self.leases)
        self.start(100, 0)
        return self.leases[before:]


class PartialLife(GroupLife):
    policy = "accept_partial"


class DropLife(GroupLife):
    when = "drop"


class FailLife(GroupLife):
    policy = "fail"
    when = "drop"


for life in (GroupLife, PartialLife, DropLife, FailLife):
    life.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRefill = GroupLife.TestCase
TestAcceptPartial = PartialLife.TestCase
TestDrop = DropLife.TestCase
TestFail = FailLife.TestCase
