"""Which process a run loses, how and when: a function of the seed and the number of the run."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

import msgspec

from rl_protocol.support.fault_points import FaultPoint


class Victim(StrEnum):
    """A kind of process."""

    CONTROLLER = "controller"
    STORAGE = "storage"
    ROLLOUT = "rollout"
    REWARD = "reward"
    TRAINER = "trainer"
    DRIVER = "driver"
    ALL = "all"
    """Every process at once."""


class Fault(StrEnum):
    """What happens to it."""

    KILL = "kill -9"
    TERMINATE = "SIGTERM"
    STOP = "SIGSTOP"
    """It is stopped, and continued after some time."""


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of one process."""

    victim: Victim
    fault: Fault
    which: int = 0
    """Of several processes of this kind; taken modulo their number."""
    event: int = 0
    """Strikes once the run has written this many events, counted over its restarts."""
    point: FaultPoint | None = None
    """Strikes there instead, in the first start of the run."""
    passes: int = 0
    """At which time that the processes of the kind reach the point, from 1."""
    after_s: float = 0.0
    """Seconds after that event."""
    seconds: float = 0.0
    """How long the process is stopped; for STOP."""


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """The faults of one run."""

    seed: int
    number: int
    """Number of the run among those of the seed, from 0."""
    max_staleness: int
    """0: synchronous training; 1: deterministic asynchronous training."""
    strikes: tuple[Strike, ...]
    """In the order of their events."""


CELLS = tuple(product(Victim, Fault))
"""Every victim with every fault."""
_POINTS = {
    FaultPoint.JOURNAL_APPENDED: (Victim.CONTROLLER, 100),
    FaultPoint.JOURNAL_PAYLOAD_SYNCED: (Victim.CONTROLLER, 100),
    FaultPoint.JOURNAL_COMMITTED: (Victim.CONTROLLER, 100),
    FaultPoint.SESSIONS_STORED: (Victim.ROLLOUT, 10),
    FaultPoint.SESSIONS_SETTLED: (Victim.ROLLOUT, 10),
    FaultPoint.GROUPS_HALF_CLEARED: (Victim.DRIVER, 2),
    FaultPoint.STATE_WRITTEN: (Victim.TRAINER, 3),
    FaultPoint.CHECKPOINT_SEALED: (Victim.DRIVER, 3),
    FaultPoint.CHECKPOINT_PUBLISHED: (Victim.DRIVER, 3),
}
"""The process that reaches each point, and how often it does at least in a run without faults."""
PLACES: tuple[tuple[Victim, Fault] | FaultPoint, ...] = (*CELLS, *_POINTS)
"""Every cell, and every point."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How long a run without faults is."""

    events: int
    """Strikes are at most at the one before this."""
    spread_s: float
    """Longest time from an event to its strike."""
    passes: float
    """How often it reaches each point, as a share of the runs with the stand-in."""


def make_schedule(seed: int, number: int, pace: Pace) -> Schedule:
    """The faults of a run. Every len(PLACES) runs that follow each other have every place once.

    Args:
        seed: of all runs.
        number: of the run, from 0.
        pace: of the runs.
    """
    cycle, place = divmod(number, len(PLACES))
    places = list(PLACES)
    random.Random(f"{seed}/{cycle}").shuffle(places)  # noqa: S311 - no secret
    rng = random.Random(f"{seed}/{number}/run")  # noqa: S311 - the same
    chosen = places[place]
    strikes = _at_point(chosen, pace, rng) if isinstance(chosen, FaultPoint) else _at_events(chosen, pace, rng)
    return Schedule(seed=seed, number=number, max_staleness=(number + cycle) % 2, strikes=strikes)


def _at_point(point: FaultPoint, pace: Pace, rng: random.Random) -> tuple[Strike, ...]:
    victim, passes = _POINTS[point]
    return (
        Strike(victim=victim, fault=Fault.KILL, point=point, passes=rng.randint(1, max(1, int(passes * pace.passes)))),
    )


def _at_events(cell: tuple[Victim, Fault], pace: Pace, rng: random.Random) -> tuple[Strike, ...]:
    """A strike of the cell, and in every fourth run another one."""
    chosen = [cell, *([rng.choice(CELLS)] if rng.random() < 0.25 else [])]
    moments = sorted(rng.randrange(1, pace.events) for _ in chosen)
    return tuple(
        Strike(
            victim=victim,
            fault=fault,
            which=rng.randrange(4),
            event=event,
            after_s=round(rng.uniform(0.0, pace.spread_s), 6),
            seconds=round(rng.uniform(0.1, 0.6), 6) if fault is Fault.STOP else 0.0,
        )
        for (victim, fault), event in zip(chosen, moments, strict=True)
    )
