"""The staleness policy, for any timing of the two pumps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_protocol import ConfigError
from rl_trainer.algorithms.staleness_policy import StalenessPolicy
from rl_trainer.config import AsyncConfig


@given(bound=st.integers(0, 4), depth=st.integers(0, 4), starts=st.lists(st.integers(0, 9), max_size=40))
def test_no_group_gets_older_than_the_depth_or_exceeds_the_capacity(bound, depth, starts):
    """A drawn number of the admitted steps has started when a step trains and makes a version."""
    policy = StalenessPolicy.of(AsyncConfig(max_staleness=bound, depth=min(depth, bound)), batch_size=3)
    started: dict[int, int] = {}
    for training, count in enumerate(starts, start=1):
        version = training - 1
        last = policy.last_admitted(training)
        wanted = [step for step in range(training, last + 1) if step not in started]
        for step in {training, *wanted[:count]} - started.keys():
            started[step] = version
        assert len([step for step in started if step >= training]) * 3 <= policy.capacity
        age = version - started[training]
        assert age <= policy.depth
        assert not policy.too_old(age)
    assert policy.too_old(bound + 1)


def test_the_depth_is_the_bound_unless_it_is_set():
    assert StalenessPolicy.of(AsyncConfig(max_staleness=3), 8).capacity == 32
    assert StalenessPolicy.of(AsyncConfig(max_staleness=3, depth=1), 8).capacity == 16
    with pytest.raises(ConfigError, match=r"depth must be at most max_staleness=1; got 2"):
        AsyncConfig(max_staleness=1, depth=2)


def test_one_permit_is_for_a_step_or_for_a_prompt():
    whole, each = StalenessPolicy(batch_size=8), StalenessPolicy(batch_size=8, max_inflight=3)
    ahead = StalenessPolicy(batch_size=8, max_staleness=3, depth=2)
    assert (whole.permits, whole.prompts_per_call(8)) == (1, 8)
    assert (ahead.permits, ahead.prompts_per_call(8)) == (3, 8)
    assert (each.permits, each.prompts_per_call(8)) == (3, 1)


@given(
    bound=st.integers(1, 4),
    depth=st.integers(1, 4),
    when_stale=st.sampled_from(["wait", "drop"]),
    draw=st.data(),
)
def test_ready_groups_overtake_others_only_within_the_bound(bound, depth, when_stale, draw):
    """Any admitted turn starts or ends at any time. The oracle is the age of what is trained."""
    depth = min(depth, bound)
    config = AsyncConfig(max_staleness=bound, depth=depth, order="ready_first", when_stale=when_stale)
    policy = StalenessPolicy.of(config, batch_size=3)
    running, ready, begun = {}, {}, 0
    for step in range(1, 9):
        version = step - 1
        waiting = list(range(begun + 1, policy.last_admitted(step) + 1))
        assert len(waiting) + len(running) + len(ready) == policy.capacity
        while (chosen := policy.select(step, ready, running, version)) is None:
            start = waiting and (not running or draw.draw(st.booleans()))
            if start:
                begun = waiting.pop(0)
                running[begun] = version
            else:
                assert running, "a deadlock: the step waits, and nothing is generated"
                turn = draw.draw(st.sampled_from(sorted(running)))
                ready[turn] = running.pop(turn)
        assert len(chosen) == 3
        for turn in chosen:
            assert not policy.too_old(version - ready.pop(turn))
        late = policy.too_late({**running, **ready}, version + 1)
        assert when_stale == "drop" or not late
        for turn in late:  # it is generated again
            running.pop(turn, None)
            ready.pop(turn, None)
            running[turn] = version + 1


def test_a_step_waits_for_a_slow_group_only_once_it_must_be_trained():
    policy = StalenessPolicy.of(AsyncConfig(max_staleness=2, depth=1, order="ready_first"), batch_size=2)
    assert (policy.turns_per_step, policy.prompts_per_turn, policy.permits) == (2, 1, 2)
    assert [policy.step_of(turn) for turn in (1, 2, 3, 4)] == [1, 1, 2, 2]
    assert policy.select(2, ready={2: 0, 4: 1}, running={1: 0, 3: 1}, version=1) == [2, 4]
    assert policy.select(3, ready={5: 2, 6: 2}, running={1: 0, 3: 1}, version=2) is None
    assert policy.select(3, ready={5: 2, 6: 2, 1: 0}, running={3: 1}, version=2) == [1, 5]
    assert policy.select(3, ready={1: 0}, running={3: 1, 5: 2, 6: 2}, version=2) is None


def test_what_can_not_be_trained_in_time_is_dropped_and_nothing_else():
    """Two groups per step: of three whose last step is the next one, the last is late."""
    config = AsyncConfig(max_staleness=1, order="ready_first", when_stale="drop")
    policy = StalenessPolicy.of(config, batch_size=2)
    assert policy.select(3, ready={5: 2, 6: 2}, running={1: 0, 3: 1}, version=2) == [5, 6]
    assert policy.too_late({1: 1, 2: 2, 7: 2, 8: 2, 9: 3}, version=3) == [1, 8]
