"""Ledger, journal and replay buffer against a plain reference, with a crash between any writes."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from lossy_disk import LossyDisk, PowerLossError
from mortal_plane import MortalPlane

from rl_protocol import PlaneLostError
from rl_protocol.ports import Lease, SessionResult, settle
from rl_protocol.testing.replay_suite import scores
from rl_transferqueue.consume.prompt_groups import ReplayConfig
from rl_transferqueue.consume.replay_buffer import ReplayBuffer

T = TypeVar("T")
CONFIG = ReplayConfig(groups_per_version=1, max_staleness=1 << 20)
SIZE = 2
"""Sessions of a group."""
TIMEOUT_S = 60.0
LAST_RUN = Path(__file__).with_name("replay_buffer_last_run.json")


class DurableReplayBuffer(RuleBasedStateMachine):
    """What was acknowledged, and what the buffer says after each crash.

    The reference: `there` must be in the buffer, `gone` must not, and of `unknown` (changed by the
    call that the crash has cut) either holds.
    """

    made: ClassVar[Counter[str]] = Counter()
    """What was done in all runs of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.rng = random.Random(0)
        self.disk = LossyDisk()
        self.there: set[str] = set()
        self.gone: set[str] = set()
        self.unknown: set[str] = set()
        self.leases: dict[str, Lease] = {}
        self.settled: dict[str, set[int]] = {}
        self.taken: set[str] = set()
        self._open([])

    def teardown(self) -> None:
        self._close()
        self.loop.close()

    # -- lives
    def _open(self, power: list[int]) -> None:
        """Start a plane and a buffer; `power`: operations of trials that the loss of power ends."""
        for operations in [*power, 1 << 60]:
            self.disk.operations = operations
            try:
                self.plane = MortalPlane(self.disk)
                self.buffer = ReplayBuffer(self.plane, "p", CONFIG, clock=lambda: 0.0)
                self.loop.run_until_complete(self.buffer.__aenter__())
            except (PowerLossError, PlaneLostError):
                self.disk = self.disk.after_power_loss(self.rng)
            else:
                self.disk.operations = 1 << 60
                return

    def _close(self) -> None:
        if not self.plane.dead:
            self.plane.die()
        self.loop.run_until_complete(self.buffer.__aexit__(None, None, None))

    def _crash(self, power: list[int], *, kill: bool) -> None:
        self.made["processes killed" if kill else "losses of power"] += 1
        self._close()
        self.disk = self.disk.after_kill() if kill else self.disk.after_power_loss(self.rng)
        self._open(power)
        self._check()

    def _check(self) -> None:
        """Fail if something acknowledged was lost, or came back."""
        found = self.buffer.statuses()
        assert self.there <= found.keys()
        assert not self.gone & found.keys()
        assert found.keys() <= self.there | self.unknown
        unsettled = self.buffer.unsettled()
        for uid, status in found.items():
            done = self.settled.get(uid, set())
            if uid not in self.unknown and len(done) == SIZE:
                assert status == "finished", uid
            if status == "running" and uid not in self.unknown:
                assert not done & set(unsettled[uid])
            if status == "finished":
                rows = self.loop.run_until_complete(self.plane.list_rows("p", where={"uid": uid}))
                assert len(rows.keys) == SIZE, (uid, rows.keys)
        self.gone |= self.unknown - found.keys()
        for uid in self.unknown & unsettled.keys():  # a cut discard may have removed rows of settled sessions
            self.settled[uid] = set(range(SIZE)) - set(unsettled[uid])
        self.there, self.unknown, self.taken = set(found), set(), set()
        self.leases = {uid: lease for uid, lease in self.leases.items() if found.get(uid) == "running"}

    def _do(self, call: Coroutine[Any, Any, T], touched: set[str]) -> T | None:
        """Run a call; None: the power went, and the plane was started again."""
        try:
            return self.loop.run_until_complete(asyncio.wait_for(call, TIMEOUT_S))
        except PlaneLostError:
            self.unknown = touched
            self.there -= touched
            self._crash([], kill=False)
            return None

    # -- what can happen
    @rule(operations=st.integers(0, 40))
    def lose_power_soon(self, operations: int) -> None:
        self.disk.operations = operations

    @rule(power=st.lists(st.integers(0, 40), max_size=2), kill=st.booleans())
    def crash(self, power: list[int], kill: bool) -> None:
        self._crash(power, kill=kill)

    @rule(count=st.integers(1, 3))
    def add(self, count: int) -> None:
        number = len(self.there | self.gone)
        uids = [f"u{number + i}" for i in range(count)]
        if self._do(_acknowledged(self.buffer.add(uids, SIZE)), set(uids)):
            self.there |= set(uids)

    @precondition(lambda self: self.buffer.counts()["pending"])
    @rule(count=st.integers(1, 2))
    def lease(self, count: int) -> None:
        for lease in self._do(self.buffer.lease(count, version=0, timeout_s=TIMEOUT_S), set()) or []:
            self.leases[lease.uid] = lease
            self.settled[lease.uid] = set()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        lease = self.leases[data.draw(st.sampled_from(sorted(self.leases)))]
        sessions = data.draw(st.sampled_from([lease.sessions, lease.sessions[:1], lease.sessions[1:]]))
        results = [SessionResult(lease, session, rows=1) for session in sessions]
        if self._do(_acknowledged(settle(self.plane, results, scores(*sessions))), set()):
            self.settled[lease.uid] |= set(sessions)
            if len(self.settled[lease.uid]) == SIZE:
                del self.leases[lease.uid]
        else:  # it may have settled
            self.leases.pop(lease.uid, None)

    @precondition(lambda self: self.buffer.counts()["finished"])
    @rule()
    def take(self) -> None:
        rows = self._do(self.buffer.take(1, version=0, timeout_s=TIMEOUT_S), set())
        if rows is not None:
            (uid,) = {str(tag["uid"]) for tag in rows.tags or ()}
            assert uid in self.there
            assert len(rows.keys) == SIZE
            self.taken.add(uid)

    @precondition(lambda self: self.taken)
    @rule()
    def commit(self) -> None:
        uids = sorted(self.taken)
        if self._do(_acknowledged(self.buffer.commit(uids)), set(uids)):
            self._forget(set(uids))

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        uids = data.draw(st.sets(st.sampled_from(sorted(self.there)), min_size=1, max_size=2))
        if self._do(_acknowledged(self.buffer.discard(sorted(uids))), uids):
            self._forget(uids)

    def _forget(self, uids: set[str]) -> None:
        self.there -= uids
        self.gone |= uids
        self.taken -= uids
        for uid in uids:
            self.leases.pop(uid, None)

    @invariant()
    def knows_what_was_acknowledged(self) -> None:
        self.made["steps"] += 1
        if not self.plane.dead:
            assert set(self.buffer.statuses()) == self.there


async def _acknowledged(call: Coroutine[Any, Any, object]) -> bool:
    await call
    return True


def test_acknowledged_groups_survive_a_crash_between_any_two_writes() -> None:
    run_state_machine_as_test(DurableReplayBuffer, settings=settings(max_examples=60, stateful_step_count=40))


@pytest.mark.nightly
def test_fifty_thousand_steps() -> None:
    """The counts of a run that has lost nothing are committed: what is covered shows."""
    DurableReplayBuffer.made.clear()
    run_state_machine_as_test(
        DurableReplayBuffer, settings=settings(max_examples=900, stateful_step_count=90, derandomize=True)
    )
    made = DurableReplayBuffer.made
    LAST_RUN.write_text(json.dumps(made, indent=2) + "\n")
    assert made["steps"] >= 50_000
