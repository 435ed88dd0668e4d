"""Experts of the rows of a batch, and at the places of a padded input."""

from __future__ import annotations

import numpy as np
import pytest

from rl_protocol import BatchData, BatchError, pack_arrays, ragged
from rl_protocol.rl_columns import ROUTED
from rl_protocol.routed_tokens import computed_lengths, experts_at_places, experts_of

TOKENS = {"prompts": ragged([[1, 2], [3]], "int64"), "responses": ragged([[7], [8, 9, 10]], "int64")}


def batch_of(*rows):
    return BatchData({**TOKENS, **pack_arrays(ROUTED, [[row] for row in rows], ndim=3, dtype="int16")})


def numbers(tokens, start=0):
    """[tokens, 2, 1], the numbers from `start` on."""
    return np.arange(start, start + 2 * tokens, dtype=np.int16).reshape(tokens, 2, 1)


def test_they_are_at_the_places_of_their_tokens():
    batch = batch_of(numbers(2), numbers(3, 10))
    assert computed_lengths(batch) == [2, 3]
    assert [one.tolist() for one in experts_of(batch)] == [numbers(2).tolist(), numbers(3, 10).tolist()]
    placed = experts_at_places(batch, 5)
    assert placed.shape == (2, 5, 2, 1)
    assert placed[0, :, 1, 0].tolist() == [1, 3, -1, -1, -1]
    assert placed[1, :, 0, 0].tolist() == [10, 12, 14, -1, -1]


def test_rows_without_experts_have_minus_one_everywhere():
    none = np.zeros((2, 0, 0), np.int16)
    placed = experts_at_places(batch_of(none, numbers(3)), 3)
    assert placed[0].ravel().tolist() == [-1] * 6
    assert placed[1].ravel().tolist() == [0, 1, 2, 3, 4, 5]
    assert experts_at_places(batch_of(none, none[[0, 0, 0]]), 3) is None
    assert experts_of(BatchData(TOKENS)) is None
    assert experts_at_places(BatchData(TOKENS), 3) is None


def test_experts_that_do_not_fit_are_refused():
    with pytest.raises(
        BatchError, match="Row 1 has 3 tokens of prompt and response with a forward pass, and experts of 4"
    ):
        experts_of(batch_of(numbers(2), numbers(4)))
    with pytest.raises(BatchError, match=r"different layers or numbers per token: \[\(2, 1\), \(6, 1\)\]"):
        experts_at_places(batch_of(numbers(2), numbers(9).reshape(3, 6, 1)), 3)
