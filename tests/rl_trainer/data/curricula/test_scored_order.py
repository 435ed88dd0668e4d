"""Curricula that see scores: what is known of prompts, weights, draws and their state."""

from __future__ import annotations

from math import exp, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_trainer.data.curricula.prompt_scores import PromptScores
from rl_trainer.data.curricula.scored import PrioritizedReplay, TargetScore
from rl_trainer.data.curricula.scored_order import ScoredOrder, draw_rows
from rl_trainer.data.prompt_draws import PromptDraws

SOURCES = ["sums", "sums", "sums", "sorting"]


def scores_after_two_steps(target=0.5):
    """Row 0 scored 1 in step 1, row 1 scored 1/4 in step 2; row 2 and all of `sorting` are new."""
    scores = PromptScores(SOURCES, target)
    scores.add(1, {0: (1.0, 0.0)})
    scores.add(2, {1: (0.25, 0.1875)})
    return scores


def test_what_is_known_by_prompt_and_by_source():
    scores = scores_after_two_steps()
    assert scores.seen.tolist() == [True, True, False, False]
    assert scores.age.tolist() == [1, 0, 2, 2]
    np.testing.assert_array_equal(scores.expected, [1.0, 0.25, 0.625, np.nan])
    sums = scores.by_source()["sums"]
    assert (sums.mean, sums.variance, sums.age) == (0.625, 0.09375, 0)
    assert "sorting" not in scores.by_source()
    scores.add(5, {0: (0.0, 0.0)})  # newer responses replace older ones
    assert scores.by_source()["sums"].mean == 0.125
    assert scores.age.tolist() == [0, 3, 5, 5]


def test_prompts_near_the_target_weigh_most():
    """Distances in widths: (1-1/2)/(1/4)=2, -1, 1/2, and 0 for a source without scores.

    A tenth is drawn by age: 1, 0, 2, 2 of 5.
    """
    near = [exp(-4), exp(-1), exp(-1 / 4), 1]
    wanted = [0.9 * one / sum(near) + 0.1 * age / 5 for one, age in zip(near, [1, 0, 2, 2], strict=True)]
    np.testing.assert_allclose(TargetScore().weights(scores_after_two_steps()), wanted, rtol=1e-12)
    new = TargetScore().weights(PromptScores(SOURCES, 0.5))
    np.testing.assert_allclose(new, [0.25] * 4, rtol=1e-12)


def test_prompts_that_all_score_far_from_the_target_have_weights_too():
    """exp(-42^2), that of a score of -10, is below the smallest number of float64."""
    scores = PromptScores(["sums", "sums"], target=0.5)
    scores.add(1, {0: (-10.0, 0.0), 1: (-10.1, 0.0)})
    ratio = exp(((10.5) ** 2 - (10.6) ** 2) / 0.25**2)
    np.testing.assert_allclose(TargetScore().weights(scores), [1 / (1 + ratio), ratio / (1 + ratio)], rtol=1e-9)


def test_prompts_with_different_scores_are_replayed_and_new_ones_come_first():
    """Standard deviations 0 and sqrt(3/16); new prompts have the largest."""
    spread = sqrt(0.1875)
    weights = [0.01**0.6, (spread + 0.01) ** 0.6, (spread + 0.01) ** 0.6, (spread + 0.01) ** 0.6]
    wanted = [0.9 * one / sum(weights) + 0.1 * age / 5 for one, age in zip(weights, [1, 0, 2, 2], strict=True)]
    np.testing.assert_allclose(PrioritizedReplay().weights(scores_after_two_steps()), wanted, rtol=1e-12)
    np.testing.assert_allclose(PrioritizedReplay().weights(PromptScores(SOURCES, 0.0)), [0.25] * 4, rtol=1e-12)


def test_rows_are_drawn_in_proportion_to_their_weights_and_free_ones_first():
    rng = np.random.default_rng(0)
    first = [draw_rows(np.array([1.0, 3.0, 0.0, 4.0]), 1, (), rng)[0] for _ in range(4000)]
    assert [first.count(row) / 4000 for row in range(4)] == pytest.approx([1 / 8, 3 / 8, 0, 1 / 2], abs=0.03)
    weights = np.array([1.0, 1.0, 0.0, 1.0])
    assert sorted(draw_rows(weights, 2, {3}, rng)) == [0, 1]
    assert sorted(draw_rows(weights, 3, {3}, rng)) == [0, 1, 3]  # no other is left
    assert sorted(draw_rows(weights, 5, (), rng))[::2] == [0, 1, 3]  # each once, then two again


class Fixed:
    """A curriculum that weighs a row by its expected score, 1 if it has none."""

    def weights(self, scores):
        return np.nan_to_num(scores.expected, nan=1.0) + 0.01


def order():
    return ScoredOrder(SOURCES * 5, batch_size=4, seed=7, curriculum=Fixed(), target=0.5)


STEPS = st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=6)


@given(steps=STEPS, cut=st.integers(0, 5))
def test_a_resumed_order_draws_what_the_uninterrupted_one_does(steps, cut):
    """The state goes through bytes after `cut` steps, while a step is sampled."""
    whole, first = order(), order()
    draws = [PromptDraws(whole), PromptDraws(first)]
    drawn = [[], []]
    for step, means in enumerate(steps, 1):
        for i, one in enumerate((whole, first)):
            rows = draws[i].draw(step, 4)
            drawn[i].append(rows)
            if i and step == cut:  # killed while the step is sampled
                first = order()
                first.restore(one.state)
                again = PromptDraws(first)
                again.restore(draws[1].position, draws[1].untrained)
                draws[1] = again
                assert again.draw(step, 4) == rows
        for i, one in enumerate((whole, first)):
            draws[i].trained(step)
            one.observe(step, {row: (mean, 0.0) for row, mean in zip(drawn[i][-1], means, strict=True)})
    assert drawn[0] == drawn[1]
    assert whole.state == first.state


def test_rows_that_are_being_trained_are_not_drawn_beside():
    draws = PromptDraws(order())
    rows = draws.draw(1, 10) + draws.draw(2, 10)
    assert sorted(rows) == list(range(20))


def test_scores_change_what_is_drawn_and_are_reported():
    one = ScoredOrder(["sums"] * 100, 10, 0, TargetScore(), target=0.5)
    easy = dict.fromkeys(range(90), (1.0, 0.0))
    assert one.observe(1, easy)["curriculum/seen_prompts"] == 90
    metrics = one.observe(2, dict.fromkeys(range(10), (0.5, 0.25)))
    assert metrics["curriculum/repeated_ratio"] == 1.0
    assert metrics["curriculum/score_change"] == -0.5
    assert metrics["curriculum/sums/score_mean"] == pytest.approx((80 + 5) / 90)
    one.trained(range(100))
    counts = np.bincount(np.concatenate([one.take(start, 10) for start in range(10)]), minlength=100)
    assert counts[:10].sum() > counts[10:90].sum()
