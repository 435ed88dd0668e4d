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
    assert (whole.permits, whole.prompts_per_call(8)) == (1, 8)
    assert (each.permits, each.prompts_per_call(8)) == (3, 1)
