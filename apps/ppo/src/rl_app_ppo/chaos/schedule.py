"""Which process a run loses, how and when: a function of the seed and the number of the run."""

from __future__ import annotations

import random
from enum import StrEnum
from itertools import product

import msgspec


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
    which: int
    """Of several processes of this kind; taken modulo their number."""
    event: int
    """Strikes once the run has written this many events, counted over its restarts."""
    after_s: float
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


def make_schedule(seed: int, number: int, events: int) -> Schedule:
    """The faults of a run. Every len(CELLS) runs that follow each other have every cell once.

    Args:
        seed: of all runs.
        number: of the run, from 0.
        events: that a run without faults writes.
    """
    cycle, place = divmod(number, len(CELLS))
    cells = list(CELLS)
    random.Random(f"{seed}/{cycle}").shuffle(cells)  # noqa: S311 - no secret
    rng = random.Random(f"{seed}/{number}/run")  # noqa: S311 - the same
    chosen = [cells[place], *([rng.choice(CELLS)] if rng.random() < 0.25 else [])]
    moments = sorted(rng.randrange(1, events) for _ in chosen)
    return Schedule(
        seed=seed,
        number=number,
        max_staleness=number % 2,
        strikes=tuple(
            Strike(
                victim=victim,
                fault=fault,
                which=rng.randrange(4),
                event=event,
                after_s=round(rng.uniform(0.0, 0.01), 6),
                seconds=round(rng.uniform(0.1, 0.6), 6) if fault is Fault.STOP else 0.0,
            )
            for (victim, fault), event in zip(chosen, moments, strict=True)
        ),
    )
