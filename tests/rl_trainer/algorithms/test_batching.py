"""Mini-batches and micro-batches: every row once, balanced, reproducible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_protocol import BatchError
from rl_trainer.algorithms.batching import micro_batches, mini_batches

pytestmark = pytest.mark.numeric


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


def test_mini_batches_are_redrawn_each_time_and_reproducible():
    lengths = np.arange(40)
    one = mini_batches(lengths, 4, np.random.default_rng((0, 1)))
    assert one == mini_batches(lengths, 4, np.random.default_rng((0, 1)))
    assert one != mini_batches(lengths, 4, np.random.default_rng((0, 2)))
    with pytest.raises(BatchError, match="40 rows can't be split into 41"):
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
