"""The built-in reward function, and calls of reward functions."""

from __future__ import annotations

import asyncio
import functools
import inspect

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_samples import samples

from rl_trainer.rewards import (
    InlineScorer,
    Scored,
    load_reward,
)
from rl_trainer.rewards.functions import run
from rl_trainer.rewards.scorer import Failure, Sample, outcome_of


def test_the_built_in_function():
    exact_match = load_reward("exact_match")
    assert exact_match("s", "280", "280") == {"score": 1.0, "acc": 1.0}
    assert exact_match("s", "28", "280") == {"score": 0.0, "acc": 0.0}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.one_of(st.floats(), st.none(), st.text(max_size=3), st.booleans()), max_size=5))
def test_every_sample_has_an_outcome_in_its_place(returned):
    values = iter(returned)
    scorer = InlineScorer(lambda *_: next(values))
    outcomes = asyncio.run(scorer.score(samples(*map(str, range(len(returned))))))
    for value, outcome in zip(returned, outcomes, strict=True):
        finite = isinstance(value, bool | float) and abs(value) <= float(np.finfo(np.float32).max)
        assert isinstance(outcome, Scored) == finite
        if finite:
            assert outcome.numbers["score"] == float(value)


def test_coroutines_are_scored_at_once_in_the_loop_of_the_caller():
    waiting, both = 0, asyncio.Event()

    async def score(data_source, solution_str, ground_truth, extra_info=None):
        nonlocal waiting
        waiting += 1
        if waiting == 2:
            both.set()
        await asyncio.wait_for(both.wait(), 60)
        return float(solution_str)  # raises for a text that is no number

    one, other = asyncio.run(InlineScorer(score).score(samples("1", "two")))
    assert one == Scored(numbers={"acc": 1.0, "score": 1.0})
    assert isinstance(other, Failure)
    assert (other.kind, other.message) == ("exception", "raised ValueError: could not convert string to float: 'two'")
    assert other.where.startswith(__file__)


def test_a_partial_of_a_coroutine_function_is_awaited():
    async def score(scale, data_source, solution_str, ground_truth, extra_info=None):
        return scale * float(solution_str)

    assert run(functools.partial(score, 2.0), samples("1.5"), 60.0) == [Scored(numbers={"acc": 3.0, "score": 3.0})]


def test_a_result_that_is_no_number_names_the_line_of_the_function():
    (bad,) = run(lambda *_: float("nan"), [Sample(data_source="", solution_str="", ground_truth="")], 1.0)
    line = inspect.currentframe().f_lineno - 1
    assert bad == Failure(
        kind="no_number", message="returned nan; it must return a finite number", where=f"{__file__}:{line}"
    )


class Odd:
    @property
    def ndim(self):
        raise RuntimeError("no shape")


def test_odd_results_of_a_batch_fail_alone():
    returned = [10**400, {1: 2.0, "score": 1.0}, {1: 2.0, "a": 3.0}, Odd(), 1.0]
    found = run(lambda data_sources, *_: returned, samples(*"abcde"), 60.0)
    assert [one.message.rpartition("; ")[2] for one in found if isinstance(one, Failure)] == [
        "it must return a finite number of at most 3.4e38 (float32)",
        "names must be texts",
        "names must be texts",
        "raised RuntimeError: no shape",
    ]
    assert found[-1] == Scored(numbers={"acc": 1.0, "score": 1.0})


def test_a_number_that_float32_does_not_hold_is_none():
    assert outcome_of(3e38) == Scored(numbers={"acc": 3e38, "score": 3e38})
    for value in (1e300, -4e38, 10**100):
        found = outcome_of(value)
        assert isinstance(found, Failure)
        assert found.message == f"returned {value!r}; it must return a finite number of at most 3.4e38 (float32)"
