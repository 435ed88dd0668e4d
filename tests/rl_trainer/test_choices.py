"""Decisions around a step: DAPO's filtering and penalty, entropy's tokens, the KL controller, mini-batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_protocol import BatchError, ConfigError, RowKey
from rl_trainer.algorithms.batching import micro_batches, mini_batches
from rl_trainer.algorithms.covariance import centred_products, clip_cov_tokens, kl_cov_tokens
from rl_trainer.algorithms.dapo import Generate, GiveUp, Train, next_round, overlong_penalty, prompts_that_teach
from rl_trainer.algorithms.kl import adaptive_kl_coef, kl_penalty

pytestmark = pytest.mark.numeric

# ---------------------------------------------------------------------------------------------------- DAPO


def test_prompts_whose_sessions_all_score_the_same_are_left_out():
    keys = [RowKey("a", 0), RowKey("a", 1), RowKey("b", 0), RowKey("b", 1), RowKey("c", 0)]
    assert prompts_that_teach(keys, np.array([1.0, 0.0, 1.0, 1.0, 0.5])) == ["a", "c"]


def test_of_a_session_the_last_trajectory_is_looked_at():
    keys = [RowKey("a", 0, 1), RowKey("a", 0, 0), RowKey("a", 1, 0)]
    assert prompts_that_teach(keys, np.array([1.0, 0.0, 1.0])) == []
    assert prompts_that_teach(keys, np.array([0.0, 1.0, 1.0])) == ["a"]


def test_refill_by_hand():
    ask = {"wanted": 8, "max_rounds": 3}
    assert next_round([f"p{i}" for i in range(9)], generated=16, rounds=1, **ask) == Train(
        uids=tuple(f"p{i}" for i in range(8))
    )
    assert next_round(["p"] * 6, generated=8, rounds=1, **ask) == Generate(num_prompts=3)  # 2 missing, 3 of 4 are kept
    assert next_round(["p"], generated=8, rounds=1, **ask) == Generate(
        num_prompts=8
    )  # 56 would be likely enough; 8 is the most
    assert next_round([], generated=8, rounds=2, **ask) == Generate(num_prompts=8)
    assert next_round(["p"], generated=24, rounds=3, **ask) == GiveUp(uids=("p",))
    with pytest.raises(ConfigError, match="at least 1"):
        next_round([], wanted=8, generated=8, rounds=1, max_rounds=0)


@settings(max_examples=40)
@given(st.integers(1, 20), st.integers(1, 6), st.floats(0, 1), st.randoms(use_true_random=False))
def test_refilling_always_ends_and_never_asks_for_more_than_a_batch(wanted, max_rounds, share, random):
    kept, generated, rounds, decision = [], 0, 0, Generate(num_prompts=wanted)
    while isinstance(decision, Generate):
        assert wanted - len(kept) <= decision.num_prompts <= wanted
        rounds, generated = rounds + 1, generated + decision.num_prompts
        kept += [f"{rounds}-{i}" for i in range(decision.num_prompts) if random.random() < share]
        decision = next_round(kept, wanted=wanted, generated=generated, rounds=rounds, max_rounds=max_rounds)
    assert rounds <= max_rounds
    assert len(decision.uids) == (wanted if isinstance(decision, Train) else len(kept))


def test_overlong_penalty_by_hand():
    lengths = np.array([0, 80, 90, 100, 120])
    assert overlong_penalty(lengths, max_length=100, buffer=20).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert overlong_penalty(lengths, max_length=100, buffer=20, factor=2.0)[2] == -1.0
    for buffer in (0, 101):
        with pytest.raises(ConfigError, match=r"within 1\.\.100"):
            overlong_penalty(lengths, max_length=100, buffer=buffer)


# ---------------------------------------------------------------------------------------------------- entropy's tokens


def test_covariance_by_hand():
    # means 0 and -2: products 1 * 1, -1 * -1, 0
    products = centred_products(np.array([1.0, -1.0, 0.0]), np.array([-1.0, -3.0, -2.0]))
    assert products.tolist() == [1.0, 1.0, 0.0]
    assert products.mean() == pytest.approx(np.cov([1.0, -1.0, 0.0], [-1.0, -3.0, -2.0], ddof=0)[0, 1])


def test_kl_cov_takes_the_largest_and_clip_cov_those_within_the_bounds():
    rng = np.random.default_rng(0)
    a, log_p = rng.normal(size=1000), rng.normal(size=1000)
    products = centred_products(a, log_p)
    chosen = kl_cov_tokens(a, log_p, ratio=0.05)
    assert chosen.sum() == 50
    assert products[chosen].min() > products[~chosen].max()
    clipped = clip_cov_tokens(a, log_p, ratio=0.01, low=0.5, high=2.0, rng=np.random.default_rng(1))
    assert clipped.sum() == 10
    assert ((products[clipped] > 0.5) & (products[clipped] < 2.0)).all()
    again = clip_cov_tokens(a, log_p, ratio=0.01, low=0.5, high=2.0, rng=np.random.default_rng(2))
    assert (again != clipped).any()


def test_at_least_one_token_is_chosen_unless_there_is_no_candidate():
    a, log_p = np.array([1.0, -1.0, 0.0]), np.array([-1.0, -3.0, -2.0])
    rng = np.random.default_rng(0)
    assert kl_cov_tokens(a, log_p, ratio=0.0002).sum() == 1
    assert clip_cov_tokens(a, log_p, ratio=0.0002, low=0.5, high=5, rng=rng).sum() == 1
    assert clip_cov_tokens(a, log_p, ratio=0.0002, low=2, high=5, rng=rng).sum() == 0
    assert kl_cov_tokens(np.zeros(0), np.zeros(0), ratio=0.5).tolist() == []


# ---------------------------------------------------------------------------------------------------- divergence


def test_kl_estimators_by_hand():
    lp, ref = np.log(np.array([0.5])), np.log(np.array([0.25]))
    d = math.log(2.0)
    assert kl_penalty(lp, ref, "k1")[0] == kl_penalty(lp, ref, "kl")[0] == pytest.approx(d)
    assert kl_penalty(ref, lp, "abs")[0] == pytest.approx(d)
    assert kl_penalty(lp, ref, "k2")[0] == kl_penalty(lp, ref, "mse")[0] == pytest.approx(d * d / 2)
    assert kl_penalty(lp, ref, "k3")[0] == kl_penalty(lp, ref, "low_var_kl")[0] == pytest.approx(0.5 - 1 + d)
    for kind in ("k4", "k3+", "full"):  # a reward has no gradient for + to change
        with pytest.raises(ConfigError, match=r"algorithm\.kl_penalty must be one of k1, k2, k3, abs"):
            kl_penalty(lp, ref, kind)


def test_k1_and_k3_estimate_the_true_divergence():
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.3, 0.4])
    truth = float((p * np.log(p / q)).sum())
    for kind in ("k1", "k3"):
        assert float((p * kl_penalty(np.log(p), np.log(q), kind)).sum()) == pytest.approx(truth)


def test_the_adaptive_coefficient_by_hand():
    move = {"target": 0.1, "horizon": 1000, "sequences": 100}
    assert adaptive_kl_coef(0.5, 0.1, **move) == 0.5
    assert adaptive_kl_coef(0.5, 0.11, **move) == pytest.approx(0.5 * (1 + 0.1 * 0.1))
    assert adaptive_kl_coef(0.5, 9.0, **move) == pytest.approx(0.5 * 1.02)  # at most 20 % per horizon
    assert adaptive_kl_coef(0.5, 0.0, **move) == pytest.approx(0.5 * 0.98)


# ---------------------------------------------------------------------------------------------------- mini-batches


@settings(max_examples=40)
@given(st.lists(st.integers(0, 4000), min_size=1, max_size=60), st.data())
def test_mini_batches_hold_every_row_once_and_are_alike(lengths, data):
    parts = data.draw(st.integers(1, len(lengths)))
    plan = mini_batches(np.array(lengths), parts, np.random.default_rng(data.draw(st.integers(0, 99))))
    assert len(plan) == parts
    assert sorted(row for part in plan for row in part) == list(range(len(lengths)))
    sizes, tokens = [len(part) for part in plan], [sum(lengths[row] for row in part) for part in plan]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert max(tokens) - min(tokens) <= max(lengths)


def test_mini_batches_are_drawn_anew_each_time_and_reproducible():
    lengths = np.arange(40)
    one = mini_batches(lengths, 4, np.random.default_rng((0, 1)))
    assert one == mini_batches(lengths, 4, np.random.default_rng((0, 1)))
    assert one != mini_batches(lengths, 4, np.random.default_rng((0, 2)))
    with pytest.raises(BatchError, match="40 rows can't be cut into 41"):
        mini_batches(lengths, 41, np.random.default_rng(0))


@settings(max_examples=40)
@given(st.lists(st.integers(0, 50), max_size=40), st.integers(50, 200))
def test_micro_batches_keep_within_their_tokens_and_hold_every_row_once(lengths, most):
    plan = micro_batches(np.array(lengths, dtype=np.int64), most)
    assert sorted(row for part in plan for row in part) == list(range(len(lengths)))
    assert all(part and sum(lengths[row] for row in part) <= most for part in plan)
    fewest = max(-(-sum(lengths) // most), min(len(lengths), 1))
    assert fewest <= len(plan) <= 2 * fewest + 1


def test_a_row_longer_than_a_micro_batch_is_named():
    with pytest.raises(BatchError, match="Row 1 has 9 tokens, more than the 8"):
        micro_batches(np.array([3, 9]), 8)
