"""The bars of bench_weight_sync.py, by engine; without one, a figure is only reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.pairs import verdict

DIRECT = "-direct"
SPEED = "speed against memcpy"
CPU_OF_ALL = "CPU of all processes in copies, per receiver"
CPU_OF_ONE = "CPU of one receiver alone in copies"
DIGESTS = "digests of both ends, share of the time"
VERL = "times faster than verl's over gloo"
PREFETCHED = "time with prefetch over time without"
RELAYED = "time with a relay over time without"
MUST = {
    ("shm", CPU_OF_ALL): 2.6,
    ("shm", SPEED): 0.45,
    ("shm-direct", CPU_OF_ALL): 2.2,
    ("shm-direct-shared", CPU_OF_ALL): 1.4,
    ("tcp", VERL): 1.0,
    ("gloo", VERL): 1.0,
    **{(engine, DIGESTS): 0.2 for engine in ("shm", "tcp", "gloo", "ray", "disk", "delta-shm")},
}
"""(engine, question) -> the required value with one receiver.

The bar on digests holds for the engines that copy at both ends, where a block can be digested while
it is in the cache.
"""


@dataclass(frozen=True)
class Bar:
    """The required and the desired value of one question; `must` is None if nothing is required."""

    must: float | None
    aim: float
    at_least: bool


def bar_of(question: str) -> Bar:
    """The bar of a question "<engine>, <n> receivers: <what>".

    >>> bar_of(f"shm-direct, 1 receiver: {CPU_OF_ALL}")
    Bar(must=2.2, aim=1.0, at_least=False)
    >>> bar_of(f"shm-direct, 2 receivers: {CPU_OF_ALL}").must is None
    True

    Raises:
        KeyError: the benchmark does not ask that.
    """
    side, _, what = question.partition(": ")
    engine, _, receivers = side.partition(", ")
    must = MUST.get((engine, what)) if receivers == "1 receiver" else None
    cpu = 1.0 if DIRECT in engine else 2.0
    aim = {SPEED: 0.6, CPU_OF_ALL: cpu, CPU_OF_ONE: cpu, DIGESTS: 0.1, VERL: 2.0, PREFETCHED: 1.0, RELAYED: 1.0}[what]
    return Bar(must, aim, at_least=what in {SPEED, VERL})


def judged(question: str, value: float, **more: Any) -> dict[str, Any]:
    """One row of a result, by the bar of its question."""
    bar = bar_of(question)
    return verdict(question, value, bar.must, bar.aim, at_least=bar.at_least, **more)
