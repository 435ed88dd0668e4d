"""Restarts are limited by the hour and delayed: times by hand, and any times against a list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_app_ppo.config.restart import RestartConfig
from rl_app_ppo.driver.restart_policy import RestartLimitError, RestartPolicy


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_waits_double_and_an_hour_later_they_start_again():
    clock = Clock()
    policy = RestartPolicy(RestartConfig(max_per_hour=4, backoff_s=0.5), clock)
    assert [policy.next("actor").wait_s for _ in range(3)] == [0.5, 1.0, 2.0]
    clock.now += 3599.0
    assert policy.next("actor").wait_s == 4.0
    with pytest.raises(
        RestartLimitError, match=r"actor was restarted 4 times within an hour.* restart.max_per_hour=4 allows"
    ):
        policy.next("actor")
    clock.now += 1.0
    again = policy.next("actor")  # the first three are an hour old
    assert (again.number, again.wait_s) == (2, 1.0)


def test_waits_have_a_limit():
    policy = RestartPolicy(RestartConfig(max_per_hour=2000, backoff_s=1.0), Clock())
    waits = [policy.next("the run").wait_s for _ in range(2000)]
    assert waits[:7] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
    assert set(waits[6:]) == {60.0}


def test_zero_restarts_nothing():
    with pytest.raises(RestartLimitError, match=r"restart\.max_per_hour=0 allows no restart of the run"):
        RestartPolicy(RestartConfig(max_per_hour=0), Clock()).next("the run")


@given(
    limit=st.integers(0, 5),
    deaths=st.lists(st.tuples(st.floats(0.0, 4000.0), st.sampled_from(["rollout-0", "the run"])), max_size=40),
)
def test_no_hour_has_more_restarts_than_the_limit_and_none_fewer_than_it_could(limit, deaths):
    clock = Clock()
    policy = RestartPolicy(RestartConfig(max_per_hour=limit, backoff_s=1.0), clock)
    done: dict[str, list[float]] = {"rollout-0": [], "the run": []}
    for later, what in deaths:
        clock.now += later
        recent = [time for time in done[what] if time > clock.now - 3600.0]
        if len(recent) >= limit:
            with pytest.raises(RestartLimitError):
                policy.next(what)
            continue
        assert policy.next(what).number == len(recent) + 1
        done[what].append(clock.now)
    for times in done.values():
        assert all(later - first >= 3600.0 for first, later in zip(times, times[limit:], strict=False))
