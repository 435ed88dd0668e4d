"""The bars of bench_weight_sync.py, the same for every engine."""

from __future__ import annotations

from dataclasses import dataclass

DIRECT = "-direct"
SPEED = "speed against memcpy"
CPU_OF_ALL = "CPU of all processes in copies, per receiver"
CPU_OF_ONE = "CPU of one receiver alone in copies"
DIGESTS = "digests of both ends, share of the time"
VERL = "times faster than verl's over gloo"


@dataclass(frozen=True)
class Bar:
    """The required and the desired value of one question."""

    must: float
    aim: float
    at_least: bool


def bar_of(question: str) -> Bar:
    """The bar of a question "<engine>, <n> receivers: <what>".

    >>> bar_of(f"tcp, 1 receiver: {CPU_OF_ONE}")
    Bar(must=2.4, aim=2.0, at_least=False)
    >>> bar_of(f"shm-direct, 1 receiver: {CPU_OF_ONE}").must
    1.2

    Raises:
        KeyError: the benchmark does not ask that.
    """
    engine, _, what = question.partition(": ")
    cpu = Bar(1.2, 1.0, at_least=False) if DIRECT in engine else Bar(2.4, 2.0, at_least=False)
    return {
        SPEED: Bar(0.45, 0.6, at_least=True),
        CPU_OF_ALL: cpu,
        CPU_OF_ONE: cpu,
        DIGESTS: Bar(0.2, 0.1, at_least=False),
        VERL: Bar(1.5, 2.0, at_least=True),
    }[what]
