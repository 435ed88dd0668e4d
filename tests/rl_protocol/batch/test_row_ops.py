"""Splits of rows, compared with brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_protocol import BatchError, balanced_parts, even_sizes
from rl_protocol.batch.row_ops import check_indices


@given(st.integers(0, 200), st.integers(1, 40))
def test_even_sizes_sum_and_differ_by_at_most_one(total: int, parts: int):
    sizes = even_sizes(total, parts)
    assert len(sizes) == parts
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_even_sizes_by_hand():
    assert even_sizes(7, 3) == [3, 2, 2]
    assert even_sizes(0, 2) == [0, 0]
    with pytest.raises(BatchError, match="at least 1 part; got 0"):
        even_sizes(3, 0)


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 12))
def test_balanced_parts_are_exact_and_hold_every_row_once(weights: list[int], parts: int):
    plan = balanced_parts(weights, parts)
    assert len(plan) == parts
    assert sorted(row for part in plan for row in part) == list(range(len(weights)))
    assert all(part == sorted(part) for part in plan)
    assert plan == balanced_parts(np.array(weights, np.int32), parts)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_balanced_parts_are_within_four_thirds_of_the_best(weights: list[int], parts: int):
    def heaviest(owner: tuple[int, ...]) -> int:
        return max(sum(w for w, o in zip(weights, owner, strict=True) if o == p) for p in range(parts))

    best = min(heaviest(owner) for owner in itertools.product(range(parts), repeat=len(weights)))
    got = max(sum(weights[i] for i in part) for part in balanced_parts(weights, parts))
    assert 3 * got <= 4 * best


def test_equal_weights_give_equal_counts():
    assert sorted(map(len, balanced_parts([4] * 10, 4))) == [2, 2, 3, 3]
    assert sorted(map(len, balanced_parts([0] * 6, 3))) == [2, 2, 2]


def test_balanced_parts_by_hand():
    assert balanced_parts([5, 1, 4, 2], 2) == [[0, 1], [2, 3]]
    assert balanced_parts([3, 3, 2, 2, 2], 2) == [[0, 2, 4], [1, 3]]
    assert balanced_parts([], 3) == [[], [], []]
    assert balanced_parts([1], 3) == [[0], [], []]


def test_balanced_parts_refuses_nonsense():
    with pytest.raises(BatchError, match="row 1 has -2"):
        balanced_parts([1, -2], 2)
    with pytest.raises(BatchError, match="got 0"):
        balanced_parts([1], 0)


def test_check_indices():
    assert check_indices([], 0).tolist() == []
    assert check_indices(range(2), 3).tolist() == [0, 1]
    assert check_indices(np.array([1], np.uint8), 3).dtype == np.int64
    for bad in ([1.0], [[0]], ["a"], [True], [2**70]):
        with pytest.raises(BatchError):
            check_indices(bad, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", [[0.5, 0.7], [float("nan"), 1.0], ["1", "2"]], ids=str)
def test_weights_that_are_no_integers_are_refused(weights: list[object]):
    """Fractions below 1 would all weigh 0."""
    with pytest.raises(BatchError, match="Weights must be integers, such as token counts; got"):
        balanced_parts(weights, 2)  # type: ignore[arg-type]
