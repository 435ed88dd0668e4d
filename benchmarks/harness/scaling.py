"""The model of ppo_step/scale_model.py: step time on N nodes from measured costs. Pure.

A step moves V bytes: workers hand over what they write and receive what they read. With L lanes
(workers that move bytes at the same time, each with a core) on N nodes:

    transfer = ops * op + V * serial + V * parallel / L + network
    network  = V * (N - 1) / N / (NIC * gates)

`op` is the cost of one call to a worker, `serial` what one process spends on every byte (the
central driver; about nothing for a data plane), `parallel` what the workers spend. The bytes of
other nodes go through the one NIC of the driver (gates = 1) or through all of them (gates = N).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

GIB = 2**30


@dataclass(frozen=True)
class Sample:
    """One measured step: seconds, driver CPU seconds, bytes moved V, calls to workers, lanes."""

    wall_s: float
    driver_cpu_s: float
    nbytes: int
    ops: int
    lanes: int


@dataclass(frozen=True)
class Costs:
    """What one plane costs on this machine: seconds per call, and per byte."""

    op_s: float
    serial_s: float
    parallel_s: float

    def seconds(self, nbytes: int, ops: int, lanes: int) -> float:
        """Transfer of a step on one node."""
        return ops * self.op_s + nbytes * (self.serial_s + self.parallel_s / lanes)


def fit(samples: Sequence[Sample]) -> Costs:
    """Fit the costs of one worker count by least squares of relative errors, none negative.

    Raises:
        ValueError: less than two samples of different bytes, or several worker counts.
    """
    if len({s.nbytes for s in samples}) < 2 or len({(s.ops, s.lanes) for s in samples}) > 1:
        raise ValueError("The fit needs at least two samples of one worker count that differ in bytes.")
    call, per_byte = _line([(s.ops, s.nbytes, s.wall_s) for s in samples])
    _, on_driver = _line([(s.ops, s.nbytes, s.driver_cpu_s) for s in samples])
    serial = min(per_byte, on_driver)
    return Costs(call, serial, (per_byte - serial) * samples[0].lanes)


def _line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """a and b >= 0 of cost = a * ops + b * bytes, each point weighted by 1 / cost."""
    matrix = np.array([(ops / cost, nbytes / cost) for ops, nbytes, cost in points])
    ones = np.ones(len(points))
    a, b = np.linalg.lstsq(matrix, ones, rcond=None)[0].tolist()
    if a < 0:
        a, b = 0.0, float(np.linalg.lstsq(matrix[:, 1:], ones, rcond=None)[0][0])
    if b < 0:
        a, b = float(np.linalg.lstsq(matrix[:, :1], ones, rcond=None)[0][0]), 0.0
    return a, b


def network_s(nbytes: int, nodes: int, nic_gib_s: float, *, through_one: bool) -> float:
    """Seconds that the bytes of other nodes take."""
    return nbytes * (nodes - 1) / nodes / (nic_gib_s * GIB * (1 if through_one else nodes))


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU; the defaults are assumptions for an H100 and 3.3 billion active parameters.

    Attributes:
        active_params: parameters that a token goes through.
        flops: floating-point operations per second that training reaches.
        passes: forward passes that a step's training, old log-probs and reference amount to
            (backward counts twice).
        decode_tokens_s: tokens per second that one GPU generates over all its sequences.
        sequence_tokens_s: tokens per second of a single sequence: the longest response takes at
            least this long.
    """

    active_params: float = 3.3e9
    flops: float = 1.5e14
    passes: float = 5.0
    decode_tokens_s: float = 2000.0
    sequence_tokens_s: float = 60.0


def compute_s(gpu: Gpu, gpus: int, rows: int, prompt: float, response: float, longest: int) -> float:
    """Seconds of training and generation in a step; generation lasts for its longest response."""
    training = rows * (prompt + response) * 2 * gpu.active_params * gpu.passes / (gpu.flops * gpus)
    generating = max(rows * response / (gpu.decode_tokens_s * gpus), longest / gpu.sequence_tokens_s)
    return training + generating


@dataclass(frozen=True)
class Spread:
    """The least and the largest ratio of measured to predicted step time."""

    least: float
    most: float


def spread(errors_percent: Sequence[float]) -> Spread:
    """From the errors 100 * (predicted / measured - 1) of points that had no part in the fit.

    >>> spread([25.0, -20.0])
    Spread(least=0.8, most=1.25)
    """
    ratios = [1 / (1 + error / 100) for error in errors_percent]
    return Spread(min(ratios), max(ratios))


def gain_bar_percent(compute: float, before: float, after: float, of_before: Spread, of_after: Spread) -> float:
    """Largest distance of the gain from its prediction, in percent, within the spread."""
    gain = gain_percent(compute, before, after)
    ends = (
        gain_percent(compute, before * b, after * a)
        for b in (of_before.least, of_before.most)
        for a in (of_after.least, of_after.most)
    )
    return max(abs(100 * (end / gain - 1)) if gain else 0.0 if end == gain else float("inf") for end in ends)


def gain_percent(compute: float, before: float, after: float) -> float:
    """How much faster steps get when their transfer falls from `before` to `after` seconds."""
    return 100 * ((compute + before) / (compute + after) - 1)
