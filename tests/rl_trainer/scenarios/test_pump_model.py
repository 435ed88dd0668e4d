"""A model of the replay buffer, the staleness policy and the pumps, driven event by event.

All parts are real but the workers, whose calls end when a rule says so. Time is that of the test.
After every rule the event loop runs until nothing is left to do, so a pump that waits while no call
is open is a deadlock, and shrinks to the shortest order of events that leads there.
"""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from pump_world import BATCH, HeldWorld, Loop, ages, play

from rl_protocol import DataLostError, WorkerError
from rl_trainer.config import ReplayConfig
from rl_trainer.config.async_rl import ON_UPDATE

STEPS = 4
LEASE_S = 600.0
LOSSY = ("reward", "adv", "old_log_prob", "read_ahead")
"""Methods whose call may find that rows are lost."""


class Pumps(RuleBasedStateMachine):
    """Any order of answers, failed rollouts, lost rows and leases that end."""

    def __init__(self):
        super().__init__()
        self.loop, self.run = Loop(), None
        asyncio.set_event_loop(self.loop)

    @initialize(
        bound=st.integers(0, 3),
        depth=st.integers(0, 3),
        inflight=st.integers(0, 6),
        kept=st.sampled_from([None, None, 3]),
        on_update=st.sampled_from(ON_UPDATE),
        order=st.sampled_from([("in_order", "wait"), ("ready_first", "wait"), ("ready_first", "drop")]),
    )
    def start(self, bound, depth, inflight, kept, on_update, order):
        self.options = {"bound": bound, "kept": kept}
        if bound:
            self.options |= {
                "depth": min(depth, bound),
                "max_inflight_prompts": inflight,
                "on_update": on_update,
                "order": order[0],
                "when_stale": order[1],
            }
        self.run_again()

    def run_again(self):
        self.failures, self.losses, self.expired = 0, 0, 0
        replay = ReplayConfig(on_failure="refill", max_attempts=99, lease_s=LEASE_S)
        self.world = HeldWorld(self.loop, steps=STEPS, replay=replay, **self.options)
        for buffer in self.world.buffers.values():
            buffer._clock = self.loop.time
        self.run = self.loop.create_task(self.world.train())
        self.loop.spin()

    @precondition(lambda self: self.run.done())
    @rule()
    def another_run(self):
        self.check_end()
        self.run_again()

    def answer(self, which):
        held = self.world.held
        held[which % len(held)].set_result(None)
        self.loop.spin()

    @precondition(lambda self: not self.run.done())
    @rule(which=st.integers(0, 7))
    def a_call_ends(self, which):
        self.answer(which)

    @precondition(lambda self: not self.run.done())
    @rule()
    def the_newest_call_ends(self):
        self.answer(-1)

    @precondition(lambda self: not self.run.done() and self.failures < 9)
    @rule()
    def the_next_rollout_fails(self):
        self.failures += 1
        self.world.faults["rollout", self.world.calls["rollout"]] = WorkerError("the rollout is late")

    @precondition(lambda self: not self.run.done() and self.losses < 3)
    @rule(method=st.sampled_from(LOSSY))
    def the_next_call_loses_rows(self, method):
        self.losses += 1
        self.world.faults[method, self.world.calls[method]] = DataLostError("a storage unit died")

    @precondition(lambda self: not self.run.done() and self.expired < 3)
    @rule()
    def all_leases_end(self):
        self.expired += 1
        self.loop.now += LEASE_S + 1
        self.loop.spin()

    @invariant()
    def somebody_works_or_the_run_is_over(self):
        assert self.run.done() or self.world.held, "a deadlock: no call is open, and the run has not ended"

    @invariant()
    def no_trajectory_is_older_than_the_bound(self):
        assert max(ages(self.world), default=0) <= self.options["bound"]

    @invariant()
    def sampling_keeps_to_its_depth_and_its_permits(self):
        depth = self.options.get("depth") or self.options["bound"]
        begun = {int(uid.partition("-")[0][1:]) for uid, _ in self.world.rolled}
        turns = BATCH if self.options.get("order") == "ready_first" else 1
        assert max(begun, default=0) <= (len(self.world.trained) + 1 + depth) * turns
        inflight = self.options.get("max_inflight_prompts")
        if inflight and not self.expired:  # the call of a lease that has ended is beside the next attempt
            assert self.world.most <= inflight

    @invariant()
    def nothing_is_trained_twice_or_without_having_been_rolled_out(self):
        trained = [uid for batch in self.world.trained for uid in batch]
        assert len(trained) == len(set(trained))
        assert {*trained} <= {uid for uid, _ in self.world.rolled}
        assert [len(batch) for batch in self.world.trained] == [BATCH] * len(self.world.trained)

    def check_end(self):
        """The run ended well: every group was trained or dropped, and nothing is left."""
        self.run.result()
        counts = self.world.trainer.group_counts()
        counts.check()
        assert (counts.trained, counts.held) == (STEPS * BATCH, 0)
        drops = self.options["kept"] is not None or self.options.get("when_stale") == "drop"
        assert counts.dropped == 0 or drops or self.losses
        assert not any(self.loop.run_until_complete(self.world.plane.stats()).rows.values())

    def teardown(self):
        if self.run is not None:
            while not self.run.done():
                self.answer(0)
            self.check_end()
        self.loop.close()


def test_no_order_of_events_stops_the_pumps_loses_a_group_or_breaks_the_bound():
    play(Pumps, examples=25, steps=40)


@pytest.mark.nightly
def test_twenty_thousand_events():
    play(Pumps, examples=400, steps=50)
