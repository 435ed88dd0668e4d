"""Train/rollout correction against values computed by hand and plain loops."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_protocol import ConfigError
from rl_protocol.support.options import items
from rl_trainer.algorithms.rollout_correction import MaskedRows, importance_weights, offpolicy_metrics, reject
from rl_trainer.config.rollout_correction import RS_CRITERIA, SECOND_MOMENT, Bounds, parse_bounds, parse_rejections

pytestmark = pytest.mark.numeric

# Row 0 has ratios 2, 0.5, 1 and 100 (masked); row 1 has 4.
RATIOS, OFFSETS = np.array([2.0, 0.5, 1.0, 100.0, 4.0]), np.array([0, 4, 5])
ROWS = MaskedRows.of(np.array([True, True, True, False, True]), OFFSETS)


@pytest.mark.parametrize(
    ("level", "bounds", "expected"),
    [
        ("token", "3", [2, 0.5, 1, 0, 3]),
        ("token", "0.6_3", [2, 0, 1, 0, 0]),  # out of bounds: weight 0
        ("sequence", "3", [1, 1, 1, 0, 3]),  # 2 * 0.5 * 1 = 1
        ("geometric", "3", [1, 1, 1, 0, 3]),
    ],
)
def test_weights_by_hand(level, bounds, expected):
    weights, metrics = importance_weights(np.log(RATIOS), ROWS, level, parse_bounds(bounds, "key"))
    assert weights.tolist() == pytest.approx(expected)
    used = [w for w, m in zip(expected, ROWS.mask, strict=True) if m]
    assert metrics["rollout_is_mean"] == pytest.approx(sum(used) / 4)
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx((sum(used) / 4) ** 2 / (sum(w * w for w in used) / 4))
    # share of tokens or of rows
    assert metrics["rollout_is_ratio_fraction_high"] == (0.25 if level == "token" else 0.5)
    assert metrics["rollout_is_seq_fraction_high"] == 0.5


def test_geometric_is_the_root_of_the_product():
    log_ratio, rows = np.log([2.0, 8.0]), MaskedRows.of(np.ones(2, bool), np.array([0, 2]))
    weights, _ = importance_weights(log_ratio, rows, "geometric", Bounds(lower=None, upper=100))
    assert weights.tolist() == pytest.approx([4, 4])
    weights, _ = importance_weights(log_ratio, rows, "sequence", Bounds(lower=None, upper=100))
    assert weights.tolist() == pytest.approx([16, 16])


def test_normalised_weights_have_mean_one():
    bounds = Bounds(lower=None, upper=3)
    weights, metrics = importance_weights(np.log(RATIOS), ROWS, "token", bounds, normalize=True)
    assert weights[ROWS.mask].mean() == pytest.approx(1)
    assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(6.5 / 4)
    weights, metrics = importance_weights(np.log(RATIOS), ROWS, "sequence", bounds, normalize=True)
    # mean of the two trajectories, not of their tokens
    assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(2)
    assert weights.tolist() == pytest.approx([0.5, 0.5, 0.5, 0, 1.5])


def slow_second_moment(log_ratio, mask, high):
    """Drop the token with the largest square until the mean of the others is small enough."""
    kept = {t: d * d for t, d in enumerate(log_ratio) if mask[t]}
    while kept and sum(kept.values()) / len(kept) > high:
        del kept[max(kept, key=kept.__getitem__)]
    return [t in kept for t in range(len(mask))]


def slow_keep(criterion, log_ratio, mask, offsets, low, high):
    if criterion == SECOND_MOMENT:
        return slow_second_moment(log_ratio, mask, high)
    level, kind = criterion.rsplit("_", 1)
    formula = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}[kind]
    reduce = {"seq_sum": sum, "seq_mean": lambda xs: sum(xs) / len(xs), "seq_max": max}
    keep = []
    for start, end in pairwise(offsets):
        here = [formula(log_ratio[t]) for t in range(start, end) if mask[t]]
        for t in range(start, end):
            if not mask[t]:
                keep.append(False)
                continue
            x = formula(log_ratio[t]) if level == "token" else reduce[level](here)
            keep.append((math.log(low) <= x <= math.log(high)) if kind == "k1" else x <= high)
    return keep


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1), criteria=st.lists(st.sampled_from(RS_CRITERIA), min_size=1, max_size=3, unique=True)
)
def test_rejection_equals_plain_loops(seed, criteria):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 5, 6)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask, log_ratio = rng.random(offsets[-1]) < 0.8, rng.normal(0, 0.3, offsets[-1])
    thresholds = ["0.8_1.3" if c.endswith("k1") else "0.05" for c in criteria]
    rejections = parse_rejections(criteria, thresholds, "key")
    kept, metrics = reject(log_ratio, MaskedRows.of(mask, offsets), rejections)
    expected = np.all(
        [slow_keep(c, log_ratio, mask, offsets, 0.8, 1.3 if c.endswith("k1") else 0.05) for c in criteria], 0
    )
    assert kept.tolist() == expected.tolist()
    if mask.any():
        assert metrics["rollout_rs_masked_fraction"] == pytest.approx(1 - expected[mask].mean())
        rows = [slice(a, b) for a, b in pairwise(offsets) if mask[a:b].any()]
        touched = [not expected[r][mask[r]].all() for r in rows]
        assert metrics["rollout_rs_seq_masked_fraction"] == pytest.approx(np.mean(touched))
        assert all(math.isfinite(v) for v in metrics.values())


def test_the_second_moment_by_hand():
    """Squares 0.04, 0.16, 0.01 and 0.16: without the two equal ones their mean is 0.025."""
    log_ratio = np.array([0.2, -0.4, 0.1, 9.0, 0.4])
    (rejection,) = parse_rejections([SECOND_MOMENT], ["0.08"], "key")
    kept, metrics = reject(log_ratio, ROWS, [rejection])
    assert kept.tolist() == [True, False, True, False, False]
    assert metrics["rollout_rs_batch_m2_mean"] == pytest.approx(0.37 / 4)
    assert metrics["rollout_rs_masked_fraction"] == 0.5
    assert reject(log_ratio, ROWS, parse_rejections([SECOND_MOMENT], ["0.1"], "key"))[0].tolist() == ROWS.mask.tolist()
    assert not reject(log_ratio, ROWS, parse_rejections([SECOND_MOMENT], ["0.001"], "key"))[0].any()


def test_metrics_by_hand():
    # Log-ratios: row 0 has log 2, log 0.5, 0 (mean 0), row 1 has log 4.
    train = np.log(np.array([0.5, 0.25, 0.5, 0.9, 0.8]))
    metrics = offpolicy_metrics(train, train - np.log(RATIOS), ROWS)
    assert metrics["kl"] == pytest.approx(-math.log(4) / 4)
    assert metrics["k3_kl"] == pytest.approx((7.5 - 4 - math.log(4)) / 4)
    assert metrics["training_ppl"] == pytest.approx((16 ** (1 / 3) + 1 / 0.8) / 2)
    assert metrics["rollout_ppl"] == pytest.approx((16 ** (1 / 3) + 1 / 0.2) / 2)
    assert metrics["log_ppl_diff"] == pytest.approx(-math.log(4) / 2)
    assert metrics["ppl_ratio"] == pytest.approx((1 + 0.25) / 2)
    assert metrics["chi2_token"] == pytest.approx((4 + 0.25 + 1 + 16) / 4 - 1)
    assert metrics["chi2_seq"] == pytest.approx((1 + 16) / 2 - 1)


def test_rows_without_tokens_are_in_no_metric():
    """A fully masked row must not pull a mean towards 0."""
    more = MaskedRows.of(np.append(ROWS.mask, [False, False]), np.append(OFFSETS, [7, 7]))
    train = np.log(np.array([0.5, 0.25, 0.5, 0.9, 0.8, 0.1, 0.1]))
    rollout = train - np.log(np.append(RATIOS, [50.0, 50.0]))
    assert offpolicy_metrics(train, rollout, more) == offpolicy_metrics(train[:5], rollout[:5], ROWS)
    rejections = parse_rejections(["seq_mean_k3"], ["0.3"], "key")
    assert reject(train - rollout, more, rejections)[1] == reject(np.log(RATIOS), ROWS, rejections)[1]
    bounds = Bounds(lower=None, upper=3)
    for level in ("token", "sequence", "geometric"):
        mine = importance_weights(train - rollout, more, level, bounds)[1]
        assert mine == pytest.approx(importance_weights(np.log(RATIOS), ROWS, level, bounds)[1])


def test_a_batch_without_a_token_gives_no_metrics_and_no_error():
    rows = MaskedRows.of(np.zeros(2, bool), np.array([0, 2]))
    assert offpolicy_metrics(np.zeros(2), np.zeros(2), rows) == {}
    assert importance_weights(np.zeros(2), rows, "token", Bounds(lower=None, upper=2))[1] == {}
    assert reject(np.zeros(2), rows, parse_rejections(["token_k1"], ["2"], "key"))[1] == {}


def test_extreme_log_ratios_stay_finite():
    rows = MaskedRows.of(np.ones(2, bool), np.array([0, 1, 2]))
    weights, metrics = importance_weights(np.array([500.0, -500.0]), rows, "sequence", Bounds(lower=None, upper=2))
    assert weights.tolist() == pytest.approx([2.0, 0.0], abs=1e-8)
    assert all(math.isfinite(v) for v in metrics.values())
    assert all(
        math.isfinite(v)
        for v in offpolicy_metrics(np.array([-1.0, -500.0]), np.array([-500.0, -1.0]), rows).values()
        if v < 1e200
    )


@pytest.mark.parametrize("text", ["", "0", "-1", "a", "3_2", "1_2_3", "nan", "inf"])
def test_bounds_that_make_no_sense_are_refused(text):
    with pytest.raises(ConfigError, match="key must be one number such as"):
        parse_bounds(text, "key")


@pytest.mark.parametrize(
    ("criteria", "thresholds", "message"),
    [
        ("token_k4", "1", "Did you mean 'token_k"),
        ("seq_max_k1", "1", "Did you mean 'seq_max_k"),
        ("token_k1,seq_sum_k1", "1,2,3", "one threshold, or 2"),
        ("token_k2", "0.1_0.2", "can't be too small"),
        ("token_k1", "0.5", "at least 1 when it is one number"),
    ],
)
def test_rejections_that_make_no_sense_are_refused(criteria, thresholds, message):
    with pytest.raises(ConfigError, match=message):
        parse_rejections(items(criteria), items(thresholds), "key")


def test_one_threshold_serves_all_and_one_number_bounds_both_sides():
    first, second = parse_rejections(["token_k1", "seq_mean_k1"], ["4"], "key")
    assert (first.bounds, second.bounds) == (Bounds(lower=0.25, upper=4.0),) * 2
