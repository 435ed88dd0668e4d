"""Shuffling, mixtures and curricula."""

from __future__ import annotations

import numpy as np
import pytest

from rl_protocol import ConfigError
from rl_trainer import Mixture, PromptOrder


def row(text="1+2=", **changes):
    return {
        "prompt": [{"role": "user", "content": text}],
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"index": 7, "split": "train"},
    } | changes


def test_without_a_curriculum_every_row_comes_once_an_epoch():
    order = PromptOrder(10, 4, seed=3)
    rows = order.take(0, 30)
    assert [sorted(rows[i : i + 10]) for i in (0, 10, 20)] == [list(range(10))] * 3
    assert rows[:10] != rows[10:20]
    assert order.rows(3) == rows[12:16]  # read alone, as a resumed run does


def test_a_mixture_gives_each_file_its_share_of_every_epoch():
    """Rows 0..9 have share 0.7, rows 10..89 share 0.2, rows 90..99 share 0.1."""
    order = PromptOrder(100, 8, seed=0, curriculum=Mixture([10, 80, 10], [7, 2, 1]))
    first, second = order.take(0, 100), order.take(100, 100)
    for rows in (first, second):
        assert sum(row < 10 for row in rows) == 70
        assert sum(10 <= row < 90 for row in rows) == 20
        assert sorted(row for row in rows if row >= 90) == list(range(90, 100))
        assert [rows.count(row) for row in range(10)] == [7] * 10
        assert max(rows.count(row) for row in range(10, 90)) == 1
    assert {row for row in first if 10 <= row < 90} != {row for row in second if 10 <= row < 90}
    assert order.take(96, 8) == first[96:] + second[:4]


def test_shares_that_do_not_divide_add_up_and_none_may_be_impossible():
    assert sorted(PromptOrder(7, 7, 0, Mixture([3, 4], [1, 0])).take(0, 7))[-1] == 2
    assert len(PromptOrder(10, 10, 0, Mixture([3, 3, 4], [1, 1, 1])).take(0, 10)) == 10
    impossible = [[0, 0], [1, -1], [float("nan"), 1], [1, float("inf")]]
    for counts, weights in (*(([1, 2], weights) for weights in impossible), ([0, 2], [1, 1])):
        with pytest.raises(ConfigError, match="Weights of data files"):
            Mixture(counts, weights)


def test_a_curriculum_decides_by_epoch():
    class EasyFirst:
        def epoch(self, number, rng):
            return np.arange(6) if number == 0 else rng.permutation(6)

    order = PromptOrder(6, 3, seed=1, curriculum=EasyFirst())
    assert order.rows(0) + order.rows(1) == list(range(6))
    assert sorted(order.take(6, 6)) == list(range(6)) != order.take(6, 6)
