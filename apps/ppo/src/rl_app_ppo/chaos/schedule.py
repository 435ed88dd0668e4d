"""Which process a run loses, how and when: a function of the seed and the number of the run."""

from __future__ import annotations

import random
from collections.abc import Sequence
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
    REFERENCE = "reference"
    CRITIC = "critic"
    DRIVER = "driver"
    ALL = "all"
    """Every process at once."""


class Fault(StrEnum):
    """What happens to it."""

    KILL = "kill -9"
    TERMINATE = "SIGTERM"
    STOP = "SIGSTOP"
    """It is stopped, and continued after some time."""
    FULL_DISK = "full disk"
    """Its writes to files fail, for some time or until it ends."""
    SLOW_DISK = "slow disk"
    """Each of its syncs at a point of the code takes longer."""
    CUT = "closed connection"
    """One of its connections to other processes is shut down."""
    SLOW_LINK = "slow connection"
    """Its messages leave and arrive late for some time: it runs a fifth of the time, and from then
    on the kernel holds as few bytes as it can of what it sends."""
    FLIP_WEIGHTS = "byte of weights"
    """A byte of the weights changes between the trainer and the rollouts."""
    FLIP_MEMORY = "byte of memory"
    """A byte of a put changes in the memory of a storage unit, after the put is durable."""
    CLOCK = "clock jump"
    """The clock of its leases jumps ahead by more than a lease."""
    FLIP_SEGMENT = "byte of a segment"
    """All are killed, and one of the last bytes of the journal's payload is changed."""
    FLIP_CHECKPOINT = "byte of a checkpoint"
    """All are killed, and a byte of the newest checkpoint is changed."""


FLIPS = (Fault.FLIP_SEGMENT, Fault.FLIP_CHECKPOINT)
"""Faults of files."""
_SIGNALS = (Fault.KILL, Fault.TERMINATE, Fault.STOP)


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of one process."""

    victim: Victim
    fault: Fault
    which: int = 0
    """Of several processes of this kind, of the connections of one, or of the bytes; taken modulo
    their number."""
    event: int = 0
    """Strikes once the run has written this many events, counted over its restarts."""
    point: FaultPoint | None = None
    """Strikes there instead, in the first start of the run."""
    passes: int = 0
    """At which time that the processes of the kind reach the point, from 1; SLOW_DISK: also at all
    later times."""
    after_s: float = 0.0
    """Seconds after that event."""
    seconds: float = 0.0
    """How long the process is stopped, its connections are slow, its disk is full (0: until it
    ends), each sync takes, or the clock jumps."""


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """The faults of one run."""

    seed: int
    number: int
    """Number of the run among those of the seed, from 0."""
    max_staleness: int
    """0: synchronous training; 1: deterministic asynchronous training."""
    strikes: tuple[Strike, ...]
    """In the order of their events."""


_MODELS = (Victim.REFERENCE, Victim.CRITIC)
_ONE = [victim for victim in Victim if victim not in (*_MODELS, Victim.ALL)]
PLANE_CELLS: tuple[tuple[Victim, Fault], ...] = (
    *product((*_ONE, Victim.ALL), _SIGNALS),
    *product((Victim.CONTROLLER, Victim.TRAINER, Victim.DRIVER, Victim.ALL), (Fault.FULL_DISK,)),
    *product((Victim.CONTROLLER, Victim.TRAINER, Victim.DRIVER), (Fault.SLOW_DISK,)),
    *product(_ONE, (Fault.CUT, Fault.SLOW_LINK)),
    (Victim.DRIVER, Fault.CLOCK),
    *product((Victim.ALL,), FLIPS),
    (Victim.STORAGE, Fault.FLIP_MEMORY),
)
"""Every victim with every fault that it can have: only these write files of the run, and files are
changed while no process is there."""
APP_CELLS = (
    *PLANE_CELLS,
    *product(_MODELS, (*_SIGNALS, Fault.CUT, Fault.SLOW_LINK)),
    (Victim.CRITIC, Fault.FULL_DISK),
    (Victim.TRAINER, Fault.FLIP_WEIGHTS),
)
"""Those of the application: the stand-in has one model, and no weights that need shared memory."""
_POINTS = {
    FaultPoint.JOURNAL_APPENDED: (Victim.CONTROLLER, 100),
    FaultPoint.JOURNAL_PAYLOAD_SYNCED: (Victim.CONTROLLER, 100),
    FaultPoint.JOURNAL_COMMITTED: (Victim.CONTROLLER, 100),
    FaultPoint.ROWS_IN_MEMORY: (Victim.STORAGE, 30),
    FaultPoint.SESSIONS_STORED: (Victim.ROLLOUT, 10),
    FaultPoint.SESSIONS_SETTLED: (Victim.ROLLOUT, 10),
    FaultPoint.GROUPS_HALF_CLEARED: (Victim.DRIVER, 2),
    FaultPoint.STATE_WRITTEN: (Victim.TRAINER, 3),
    FaultPoint.WEIGHTS_SENT: (Victim.TRAINER, 6),
    FaultPoint.LEASE_CLOCK_READ: (Victim.DRIVER, 30),
    FaultPoint.CHECKPOINT_SEALED: (Victim.DRIVER, 3),
    FaultPoint.CHECKPOINT_PUBLISHED: (Victim.DRIVER, 3),
}
"""The process that reaches each point, or whose memory is at hand there, and how often at least in
a run without faults."""
_ONLY_AT = {
    Fault.FLIP_WEIGHTS: FaultPoint.WEIGHTS_SENT,
    Fault.FLIP_MEMORY: FaultPoint.ROWS_IN_MEMORY,
    Fault.CLOCK: FaultPoint.LEASE_CLOCK_READ,
}
"""Where faults happen that need a certain point."""
NOT_KILLED_AT = (FaultPoint.LEASE_CLOCK_READ, FaultPoint.ROWS_IN_MEMORY)
"""Points that have only another fault."""
_JUMP_S = 1e5
_SYNCS = {
    Victim.CONTROLLER: (FaultPoint.JOURNAL_APPENDED, FaultPoint.JOURNAL_PAYLOAD_SYNCED),
    Victim.TRAINER: (FaultPoint.STATE_WRITTEN,),
    Victim.DRIVER: (FaultPoint.CHECKPOINT_SEALED, FaultPoint.CHECKPOINT_PUBLISHED),
}
"""Where the syncs of a process lie."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How long a run without faults is."""

    events: int
    """Strikes are at most at the one before this."""
    spread_s: float
    """Longest time from an event to its strike."""
    passes: float
    """How often it reaches each point, as a share of the runs with the stand-in."""
    cells: Sequence[tuple[Victim, Fault]]
    """What can strike it."""


def make_schedule(seed: int, number: int, pace: Pace) -> Schedule:
    """The faults of a run. Every len(pace.cells) runs that follow each other have every cell once.

    From one such cycle to the next, synchronous and asynchronous training take turns, and a process
    with points is killed once at an event, then at one of its points after the other.

    Args:
        seed: of all runs.
        number: of the run, from 0.
        pace: of the runs.
    """
    cycle, place = divmod(number, len(pace.cells))
    order = list(pace.cells)
    random.Random(f"{seed}/{cycle}").shuffle(order)  # noqa: S311 - no secret
    rng = random.Random(f"{seed}/{number}/run")  # noqa: S311 - the same
    victim, fault = order[place]
    point = _point(victim, fault, cycle, pace)
    turn = pace.cells.index(order[place]) + cycle + cycle // 4  # 4: the points of a process repeat
    strikes = (
        (_at_point(victim, fault, point, pace, rng),) if point is not None else _at_events((victim, fault), pace, rng)
    )
    return Schedule(seed=seed, number=number, max_staleness=turn % 2, strikes=strikes)


def _point(victim: Victim, fault: Fault, cycle: int, pace: Pace) -> FaultPoint | None:
    """The point of a cycle at which a fault is injected; None: it is injected at an event."""
    if fault in _ONLY_AT:
        return _ONLY_AT[fault]
    if fault is Fault.SLOW_DISK:
        return _SYNCS[victim][cycle % len(_SYNCS[victim])]
    if fault is not Fault.KILL:
        return None
    never = {*NOT_KILLED_AT}
    if (victim, Fault.FLIP_WEIGHTS) not in pace.cells:
        never.add(FaultPoint.WEIGHTS_SENT)
    points = [None, *(point for point, (by, _) in _POINTS.items() if by is victim and point not in never)]
    return points[cycle % len(points)]


def _at_point(victim: Victim, fault: Fault, point: FaultPoint, pace: Pace, rng: random.Random) -> Strike:
    passes = rng.randint(1, max(1, int(_POINTS[point][1] * pace.passes)))
    slow_s = round(rng.uniform(0.01, 0.05), 6)
    seconds = {Fault.SLOW_DISK: slow_s, Fault.CLOCK: _JUMP_S}.get(fault, 0.0)
    return Strike(victim=victim, fault=fault, point=point, passes=passes, seconds=seconds)


def _at_events(cell: tuple[Victim, Fault], pace: Pace, rng: random.Random) -> tuple[Strike, ...]:
    """A strike of the cell, and in every fourth run another one."""
    others = [other for other in pace.cells if other[1] not in {Fault.SLOW_DISK, *_ONLY_AT}]
    chosen = [cell, *([rng.choice(others)] if rng.random() < 0.25 else [])]
    moments = sorted(rng.randrange(1, pace.events) for _ in chosen)
    return tuple(
        Strike(
            victim=victim,
            fault=fault,
            which=-rng.randrange(1, 1 << 10) if fault is Fault.FLIP_SEGMENT else rng.randrange(1 << 20),
            event=event,
            after_s=round(rng.uniform(0.0, pace.spread_s), 6),
            seconds=_lasts(fault, rng),
        )
        for (victim, fault), event in zip(chosen, moments, strict=True)
    )


def _lasts(fault: Fault, rng: random.Random) -> float:
    """Seconds of a fault; every second full disk stays full."""
    if fault is Fault.SLOW_LINK:
        return round(rng.uniform(0.5, 2.0), 6)
    if fault is Fault.STOP or (fault is Fault.FULL_DISK and rng.random() < 0.5):
        return round(rng.uniform(0.1, 0.6), 6)
    return 0.0
