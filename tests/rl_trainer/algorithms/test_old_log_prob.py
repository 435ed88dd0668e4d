"""Differences between log-probs of rollout engine and actor, and which rows are compared."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_protocol import BatchError, ragged
from rl_trainer import AlgorithmConfig
from rl_trainer.algorithms.old_log_prob import (
    GAP,
    LogProbGap,
    interpolation,
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
    metrics = LogProbGap.of(ROLLOUT, ACTOR, MASK, np.array([0, 4])).metrics()
    probs, log_probs = [0.1, 0.1, 0.0], [math.log(5 / 4), math.log(3 / 2), 0.0]
    assert metrics == pytest.approx(
        {
            "training/rollout_probs_diff_mean": sum(probs) / 3,
            "training/rollout_probs_diff_max": 0.1,
            "training/rollout_probs_diff_std": statistics.stdev(probs),
            GAP: sum(log_probs) / 3,
            "training/rollout_log_probs_diff_max": math.log(3 / 2),
            "training/rollout_probs_diff_quarter_1": 0.1,
            "training/rollout_probs_diff_quarter_2": 0.1,
            "training/rollout_probs_diff_quarter_4": 0.0,
        },
        rel=1e-5,
    )
    assert LogProbGap.of(ROLLOUT, ACTOR, np.zeros(4, np.bool_), np.array([0, 4])).metrics() == {}


def test_differences_by_position_are_in_quarters_of_each_response():
    """Of six tokens, 2, 1, 2 and 1 are in the quarters; of two tokens, one is in the first and one
    in the third.
    """
    rollout, actor = np.log(np.full(8, 0.5)), np.log(0.5 - np.array([1, 2, 3, 4, 5, 6, 7, 9]) / 100)
    gap = LogProbGap.of(rollout, actor, np.ones(8, np.bool_), np.array([0, 6, 6, 8]))
    found = [gap.metrics()[f"training/rollout_probs_diff_quarter_{i}"] for i in (1, 2, 3, 4)]
    assert found == pytest.approx([(1 + 2 + 7) / 300, 3 / 100, (4 + 5 + 9) / 300, 6 / 100], rel=1e-9)


def test_differences_of_parts_add_up_to_that_of_the_whole():
    bounds = np.array([0, 1, 3, 4])
    whole = LogProbGap.of(ROLLOUT, ACTOR, MASK, bounds)
    parts = (
        LogProbGap.of(ROLLOUT[a:b], ACTOR[a:b], MASK[a:b], np.array([0, b - a])) for a, b in itertools.pairwise(bounds)
    )
    assert sum(parts, LogProbGap()).metrics() == pytest.approx(whole.metrics(), rel=1e-9)


def test_a_log_prob_that_is_no_number_does_not_pass_for_agreement():
    gap = LogProbGap.of(np.array([math.nan, -1.0]), np.array([-1.0, -1.0]), np.array([True, True]), np.array([0, 2]))
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


@pytest.mark.parametrize("mode", ["auto", "recompute", "rollout", "interpolate"])
def test_otherwise_the_mode_is_the_configured_one(mode):
    algorithm = AlgorithmConfig(old_log_prob=mode)
    assert old_log_prob_mode(algorithm) == mode
    assert (loss_correction(algorithm) is not None) == (mode in ("rollout", "interpolate"))


def runs(*rows):
    return ragged([np.array(row, np.int32).reshape(-1, 2) for row in rows], "int32")


def test_the_old_policy_is_one_version_before_the_trained_one():
    """Version 7 is trained: a token of version 5 is two versions old, one before the old policy."""
    column = interpolation(runs([[7, 1], [6, 2], [5, 1]], [], [[4, 1], [3, 1]]), trained=7)
    expected = [0, 0, 0, 1 / 2, 2 / 3, 3 / 4]
    assert column.values.tolist() == pytest.approx(expected, rel=1e-6)
    assert column.offsets.tolist() == [0, 4, 4, 6]
    assert column.dtype == "float32"


@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=4), min_size=1, max_size=4))
def test_interpolation_agrees_with_the_slope_of_a_line_through_both_policies(rows):
    """Log-probs that are linear in the version have the interpolated value at the old version."""
    made = interpolation(runs(*rows), trained=10)
    places = made.rows()
    for row, values in zip(rows, places, strict=True):
        versions = [version for version, tokens in row for _ in range(tokens)]
        # log p(v) = 3 v - 1; between v and 10, at version 9
        found = [(3 * v - 1) + a * ((3 * 10 - 1) - (3 * v - 1)) for v, a in zip(versions, values.tolist(), strict=True)]
        assert found == pytest.approx([3 * 9 - 1] * len(versions), rel=1e-5)


def test_a_token_of_later_weights_is_refused():
    with pytest.raises(BatchError, match="has tokens of version 8 of the weights, and the update trains version 7"):
        interpolation(runs([[7, 1]], [[6, 2], [8, 1]]), trained=7)
