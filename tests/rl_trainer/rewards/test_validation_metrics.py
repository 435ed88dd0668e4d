"""Validation metrics against values computed by hand and brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_trainer.rewards import Failure, Scored
from rl_trainer.rewards.validation_metrics import (
    ScoredSession,
    majority,
    mean_accuracy,
    pass_at_k,
    sizes,
    validation_metrics,
)


def judged(source, uid, *accs, preds=None):
    preds = preds or [None] * len(accs)
    return [ScoredSession(source=source, uid=uid, acc=a, score=2 * a, pred=p) for a, p in zip(accs, preds, strict=True)]


def test_one_session_per_prompt_has_a_mean_and_nothing_else():
    metrics = validation_metrics([*judged("a", "p", 1.0), *judged("a", "q", 0.0), *judged("b", "r", 1.0)])
    assert metrics == {
        "val-core/a/acc/mean@1": 0.5,
        "val-aux/a/score/mean@1": 1.0,
        "val-core/b/acc/mean@1": 1.0,
        "val-aux/b/score/mean@1": 2.0,
    }


def test_names_and_sections_are_those_of_verl():
    metrics = validation_metrics(judged("a", "p", 1.0, 0.0, 0.0, 1.0, preds=["x", "y", "y", "x"]))
    core = {name.removeprefix("val-core/a/acc/") for name in metrics if name.startswith("val-core/")}
    assert core == {"mean@4", "best@4/mean", "best@4/std", "maj@4/mean", "maj@4/std", "pass@4"}
    aux = {name.removeprefix("val-aux/a/") for name in metrics if name.startswith("val-aux/")}
    assert {
        "acc/std@4",
        "acc/worst@4/mean",
        "acc/best@2/mean",
        "acc/maj@2/mean",
        "acc/pass@2",
        "score/best@4/mean",
    } <= aux
    assert not core & aux


def test_the_bootstrap_comes_near_what_drawing_with_replacement_gives():
    """Two of four are right, so the best of k draws is right with probability 1 - 2**-k."""
    metrics = validation_metrics(judged("a", "p", 1.0, 0.0, 1.0, 0.0, preds=["7", "8", "7", "9"]))
    for k, best in ((2, 0.75), (4, 0.9375)):
        section = "core" if k == 4 else "aux"
        assert metrics[f"val-{section}/a/acc/best@{k}/mean"] == pytest.approx(best, abs=0.04)
        assert metrics[f"val-aux/a/acc/worst@{k}/mean"] == pytest.approx(1 - best, abs=0.04)
    # Majority of four draws, ties to the first drawn, over all 4**4 equally likely draws.
    right, preds = [1.0, 0.0, 1.0, 0.0], ["7", "8", "7", "9"]
    exact = np.mean([vote(right, preds, draw) for draw in itertools.product(range(4), repeat=4)])
    assert metrics["val-core/a/acc/maj@4/mean"] == pytest.approx(exact, abs=0.05)


def vote(acc, preds, draw):
    """Plain majority vote, for comparison."""
    order = [preds[i] for i in draw]
    winner = max(order, key=lambda pred: (order.count(pred), -order.index(pred)))
    return acc[draw[order.index(winner)]]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=6), st.data())
def test_the_majority_is_that_of_plain_counting(classes, data):
    draws = data.draw(
        st.lists(st.lists(st.integers(0, len(classes) - 1), min_size=3, max_size=3), min_size=1, max_size=5)
    )
    acc = [float(c == 1) for c in classes]
    ours = majority(np.array(acc), np.array(classes), np.array(draws))
    assert ours.tolist() == [vote(acc, classes, draw) for draw in draws]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_one(n, data):
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([True] * right + [False] * (n - right), k))
    assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_by_hand():
    """Chen et al. 2021, eq. 1 with n=4, c=1, k=2: 1 - C(3,2)/C(4,2) = 1 - 3/6."""
    assert pass_at_k(4, 1, 2) == 0.5
    metrics = validation_metrics([*judged("a", "p", 1.0, 0, 0, 0), *judged("a", "q", 0, 0, 0, 0.0)])
    assert (metrics["val-aux/a/acc/pass@2"], metrics["val-core/a/acc/pass@4"]) == (0.25, 0.5)


def test_the_sizes_are_powers_of_two_and_all():
    assert [sizes(n) for n in (1, 2, 3, 4, 6, 8)] == [[], [2], [2, 3], [2, 4], [2, 4, 6], [2, 4, 8]]


def test_failed_sessions_count_in_every_denominator():
    failure = Failure(kind="timeout", message="late")
    right = Scored(numbers={"acc": 1.0, "score": 3.0}, texts={"pred": "7"})
    outcomes = [right, failure, right, failure]
    metrics = validation_metrics([ScoredSession.of("a", "p", outcome) for outcome in outcomes])
    assert metrics["val-core/a/acc/mean@4"] == 0.5
    assert metrics["val-aux/a/score/mean@4"] == 1.5
    assert metrics["val-core/a/acc/pass@4"] == 1.0
    assert metrics["val-aux/a/acc/pass@2"] == pytest.approx(1 - 1 / 6)
    assert metrics["val-aux/a/reward_failures"] == 2.0
    # failed sessions are drawn, too, but do not agree with each other
    assert metrics["val-core/a/acc/maj@4/mean"] < 1.0


def test_prompts_weigh_alike():
    metrics = validation_metrics([*judged("a", "p", 1.0, 1.0), *judged("a", "q", 0.0, 0.0)])
    assert metrics["val-core/a/acc/mean@2"] == 0.5
    assert metrics["val-aux/a/acc/std@2"] == 0.0


def test_checkpoints_are_compared_by_the_mean_accuracy_of_the_data_sources():
    sessions = [*judged("a/mean@x", "p", 1.0), *judged("a/mean@x", "q", 0.0), *judged("b", "r", 1.0, 0.0, 0.0, 0.0)]
    metrics = validation_metrics(sessions)
    assert mean_accuracy(sessions) == 0.375
    assert (
        mean_accuracy(sessions) == (metrics["val-core/a/mean@x/acc/mean@1"] + metrics["val-core/b/acc/mean@4"]) / 2
    ), "the same numbers as the metrics, however a data source is named"
    assert mean_accuracy([]) is None


def test_prompts_with_fewer_sessions_do_not_count_in_the_mean_accuracy():
    assert mean_accuracy([*judged("a", "p", 1.0, 1.0), *judged("a", "q", 0.0)]) == 1.0
