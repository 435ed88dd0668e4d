"""Idle seconds by role and cause, on a clock that the test sets."""

from __future__ import annotations

import asyncio

import pytest

from rl_trainer.driver.idle import IdleClock
from rl_trainer.driver.stage_calls import Workers


class Hands:
    """A clock, and workers whose calls take the seconds that they are told."""

    def __init__(self):
        self.now = 100.0
        self.bytes_moved, self.name, self.process = 7, "worker", self

    def __call__(self):
        return self.now

    async def call(self, method, payload, *, timeout_s):
        self.now += float(payload)
        return b"answer"


def idle(clock):
    return {name.removeprefix("idle/"): seconds for name, seconds in clock.read().items() if seconds}


def test_who_has_no_call_is_starved_unless_weights_are_sent_or_a_validation_runs():
    hands = Hands()
    clock = IdleClock(hands)
    with clock.busy("rollout"):
        hands.now += 2
    with clock.busy("trainer"), clock.busy("rollout"):
        hands.now += 3
    with clock.because("refit"):
        hands.now += 4
    with clock.because("validation"), clock.busy("rollout"):
        hands.now += 5
    assert idle(clock) == {
        "rollout/refit": 4,
        "trainer/starved": 2,
        "trainer/refit": 4,
        "trainer/validation": 5,
        "reward/starved": 5,
        "reward/refit": 4,
        "reward/validation": 5,
    }
    assert idle(clock) == {}


def test_a_role_is_busy_while_one_of_its_workers_is():
    hands = Hands()
    clock = IdleClock(hands)
    with clock.busy("rollout"):
        with clock.busy("rollout"):
            hands.now += 1
        hands.now += 1
    hands.now += 1
    assert idle(clock)["rollout/starved"] == 1


@pytest.mark.parametrize("seconds", [2.0, 0.5])
def test_calls_make_roles_busy_and_workers_stay_who_they_are(seconds):
    hands, actor = Hands(), Hands()
    clock = IdleClock(hands)
    before = Workers(rollout=[hands, hands], reward=hands, actor=[actor], ref=[actor])
    workers = clock.watched(before)
    assert workers.ref[0] is workers.actor[0]
    assert len(workers.all()) == len(before.all())
    assert workers.actor[0].process is actor
    assert (workers.actor[0].name, workers.actor[0].bytes_moved) == ("worker", 7)
    assert asyncio.run(workers.rollout[1].call("rollout", str(seconds).encode(), timeout_s=1)) == b"answer"
    assert idle(clock) == {"trainer/starved": seconds, "reward/starved": seconds}
