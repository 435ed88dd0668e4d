"""When a step compares a sample of log-probs, and what it asks of which rank."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from rl_protocol import KVBatchMeta
from rl_trainer.algorithms.old_log_prob import GAP, LogProbGap
from rl_trainer.driver.old_log_prob import AutoOldLogProb
from rl_trainer.driver.stage_calls import Workers
from rl_trainer.driver.stage_runner import Clock
from rl_trainer.workers.messages import ReadAheadCall, StageCall, StageResult


class Rank:
    """Answers with a difference of one token, and keeps the calls."""

    def __init__(self, name, gap):
        self.name, self.process, self.bytes_moved, self.gap, self.calls = name, self, 0, gap, []

    async def call(self, method, payload, *, timeout_s):
        kind = ReadAheadCall if method == "read_ahead" else StageCall
        self.calls.append((method, msgspec.msgpack.decode(payload, type=kind).batch.keys))
        one = LogProbGap(tokens=1, log_prob_sum=self.gap, log_prob_max=self.gap)
        return msgspec.msgpack.encode(StageResult() if method == "read_ahead" else one)


def rows(count):
    tags = tuple({"prompt_len": 2, "response_len": 3} for _ in range(count))
    return KVBatchMeta(partition="train", keys=tuple(f"p{i}/0/0" for i in range(count)), tags=tags)


def auto():
    return AutoOldLogProb(1e-3, seed=0, timeout_s=60)


def test_all_rows_are_compared_first_every_twentieth_step_and_when_rows_are_old():
    assert [step for step in range(1, 64) if not auto().samples(step, lag=0)] == [1, 21, 41, 61]
    assert not auto().samples(2, lag=1)


@pytest.mark.parametrize(("gap", "lag", "samples"), [(2e-3, 0.0, False), (1e-3, 0.0, True), (2e-3, 1.0, True)])
def test_after_a_larger_difference_all_rows_are_compared_unless_old_rows_explain_it(gap, lag, samples):
    choice = auto()
    choice.note({GAP: gap, "training/off_policy/trajectory_staleness_worst/max": lag})
    assert choice.samples(2, lag=0) == samples
    choice.note({GAP: 0.0})
    assert choice.samples(2, lag=0)


def test_ranks_of_one_replica_get_the_same_rows_and_count_once():
    ranks = [Rank(str(i), gap) for i, gap in enumerate((1.0, 1.0, 3.0, 3.0))]
    clock, workers = Clock(), Workers(rollout=(), reward=ranks[0], actor=ranks, dp_ranks=(0, 0, 1, 1))
    gap = asyncio.run(auto().compare(clock, 2, rows(80), workers, lag=0))
    assert gap.tokens == 2
    assert clock.seconds["timing_s/log_prob_gap"] > 0
    assert gap.metrics()[GAP] == 2.0
    asked = [rank.calls[1][1] for rank in ranks]
    assert asked[0] == asked[1]
    assert asked[2] == asked[3]
    assert len({*asked[0], *asked[2]}) == 4
    assert [[method for method, _ in rank.calls] for rank in ranks] == [["read_ahead", "log_prob_gap"]] * 4


def test_a_step_with_fewer_rows_than_ranks_which_trains_none_compares_none():
    """So few are left of a step most of whose responses have failed."""
    ranks = [Rank(str(i), 0.0) for i in range(4)]
    workers = Workers(rollout=(), reward=ranks[0], actor=ranks, dp_ranks=(0, 0, 1, 1))
    assert asyncio.run(auto().compare(Clock(), 2, rows(1), workers, lag=0)) is None
    assert not any(rank.calls for rank in ranks)
    assert asyncio.run(auto().compare(Clock(), 2, rows(2), workers, lag=0)) is not None
