"""Differences between log-probs of rollout engine and actor, and which rows are compared."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from rl_trainer import AlgorithmConfig
from rl_trainer.algorithms.old_log_prob import (
    GAP,
    LogProbGap,
    loss_correction,
    old_log_prob_mode,
    recompute_reason,
    sampled_rows,
)
from rl_trainer.config import RolloutCorrectionConfig

ROLLOUT = np.log(np.array([0.5, 0.2, 0.9, 0.4], np.float32))
ACTOR = np.log(np.array([0.4, 0.3, 0.1, 0.4], np.float32))
MASK = np.array([True, True, False, True])


def test_the_difference_is_that_of_unmasked_tokens():
    metrics = LogProbGap.of(ROLLOUT, ACTOR, MASK).metrics()
    probs, log_probs = [0.1, 0.1, 0.0], [math.log(5 / 4), math.log(3 / 2), 0.0]
    assert metrics == pytest.approx(
        {
            "training/rollout_probs_diff_mean": sum(probs) / 3,
            "training/rollout_probs_diff_max": 0.1,
            "training/rollout_probs_diff_std": statistics.stdev(probs),
            GAP: sum(log_probs) / 3,
            "training/rollout_log_probs_diff_max": math.log(3 / 2),
        },
        rel=1e-5,
    )
    assert LogProbGap.of(ROLLOUT, ACTOR, np.zeros(4, np.bool_)).metrics() == {}


def test_differences_of_parts_add_up_to_that_of_the_whole():
    whole = LogProbGap.of(ROLLOUT, ACTOR, MASK)
    parts = (LogProbGap.of(ROLLOUT[part], ACTOR[part], MASK[part]) for part in (slice(0, 1), slice(1, 3), slice(3, 4)))
    assert sum(parts, LogProbGap()).metrics() == pytest.approx(whole.metrics(), rel=1e-9)


def test_a_log_prob_that_is_no_number_does_not_pass_for_agreement():
    gap = LogProbGap.of(np.array([math.nan, -1.0]), np.array([-1.0, -1.0]), np.array([True, True]))
    assert not gap.metrics()[GAP] <= 1e-3


@pytest.mark.parametrize(("count", "ranks", "size"), [(200, 1, 10), (19, 1, 1), (40, 4, 4), (3, 8, 3)])
def test_a_sample_has_a_twentieth_of_the_rows_and_one_for_each_rank(count, ranks, size):
    rows = sampled_rows(count, ranks, seed=1, step=2)
    assert len(set(rows)) == size
    assert rows == sorted(rows)
    assert set(rows) <= set(range(count))


def test_a_sample_depends_on_seed_and_step_alone():
    one = sampled_rows(1000, 1, seed=1, step=2)
    assert sampled_rows(1000, 1, seed=1, step=2) == one
    assert sampled_rows(1000, 1, seed=1, step=3) != one
    assert sampled_rows(1000, 1, seed=2, step=2) != one


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"adv_estimator": "optimal_token_baseline"}, "sum_pi_squared"),
        ({"rollout_correction": RolloutCorrectionConfig(rollout_is="token")}, "rollout_is"),
        (
            {"rollout_correction": RolloutCorrectionConfig(rollout_rs=("token_k1",), rollout_rs_threshold=("2",))},
            "rollout_rs",
        ),
    ],
)
def test_what_reads_the_pass_of_the_actor_makes_auto_recompute(settings, named):
    algorithm = AlgorithmConfig(**settings)
    assert named in recompute_reason(algorithm)
    assert old_log_prob_mode(algorithm) == "recompute"
    assert loss_correction(algorithm) is None


@pytest.mark.parametrize("mode", ["auto", "recompute", "rollout"])
def test_otherwise_the_mode_is_the_configured_one(mode):
    algorithm = AlgorithmConfig(old_log_prob=mode)
    assert old_log_prob_mode(algorithm) == mode
    assert (loss_correction(algorithm) is not None) == (mode == "rollout")
