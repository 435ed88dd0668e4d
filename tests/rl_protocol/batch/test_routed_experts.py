"""Experts of tokens: joined, filled and checked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_protocol import BatchData, BatchError, DistinctIds, SchemaError, pack_arrays
from rl_protocol.batch.routed_experts import check_experts, computed_tokens, fill_routed, join_routed
from rl_protocol.rl_columns import ROUTED, ROUTED_COLUMNS, TRAJECTORY_SCHEMA


def experts(*tokens):
    """[tokens, 1, 2]."""
    return np.array(tokens, np.int16)[:, None]


def test_a_token_has_the_experts_of_the_first_pass_that_computed_it():
    first, second = experts((0, 1), (1, 2)), experts((3, 0), (3, 0), (2, 1), (1, 0))
    joined = join_routed([first, None, second])
    assert joined.tolist() == [[[0, 1]], [[1, 2]], [[2, 1]], [[1, 0]]]
    assert join_routed([second, first]).tolist() == second.tolist()
    assert join_routed([None, None]) is None
    assert join_routed([]) is None


def test_the_last_tokens_without_experts_are_filled():
    assert fill_routed(experts((0, 1)), 3).tolist() == [[[0, 1]], [[-1, -1]], [[-1, -1]]]
    assert fill_routed(None, 3).shape == (3, 0, 0)
    assert fill_routed(experts((0, 1)), 1).tolist() == [[[0, 1]]]


@given(st.integers(1, 9), st.integers(0, 9))
def test_all_tokens_but_the_last_of_a_response_are_computed(prompt, response):
    sequence = [*range(prompt), *range(response)]
    assert computed_tokens(prompt, response) == len(sequence[:-1] if response else sequence)


def test_another_number_of_tokens_and_unknown_experts_are_refused():
    routed = experts((0, 3), (-1, -1))
    check_experts(routed, 2, 4, "p")
    check_experts(np.zeros((2, 0, 0), np.int16), 2, 4, "p")
    with pytest.raises(
        BatchError, match=r"p has 3 tokens with a forward pass, and routed experts of shape \(2, 1, 2\)"
    ):
        check_experts(routed, 3, 4, "p")
    with pytest.raises(BatchError, match="p has a routed expert 3, and the model has the experts 0 to 2"):
        check_experts(routed, 2, 3, "p")
    with pytest.raises(BatchError, match="p has a routed expert -2"):
        check_experts(experts((0, -2)), 1, 3, "p")


def packed(*rows):
    return BatchData(pack_arrays(ROUTED, [[row] for row in rows], ndim=3, dtype="int16"))


def test_the_schema_refuses_a_token_with_one_expert_twice():
    TRAJECTORY_SCHEMA.check(packed(experts((0, 3), (-1, -1)), np.zeros((2, 0, 0), np.int16)))
    with pytest.raises(SchemaError, match=r"Row 1 \('b'\), column 'routed_experts': .* got \[2, 2\]; 1 of 2 groups"):
        TRAJECTORY_SCHEMA.check(packed(experts((0, 3)), experts((0, 1), (2, 2))), ["a", "b"])
    with pytest.raises(SchemaError, match=r"got \[0, -1\]"):
        TRAJECTORY_SCHEMA.check(packed(experts((0, -1))))
    columns = packed(experts((0, 3), (1, 2))).columns
    short = {**columns, ROUTED: packed(experts((0, 3))).columns[ROUTED]}
    with pytest.raises(SchemaError, match=r"expected length .*routed_experts\.shapes.* = 4, got 2"):
        TRAJECTORY_SCHEMA.check(BatchData(short))


@given(st.lists(st.lists(st.integers(-2, 3), min_size=3, max_size=3), min_size=1, max_size=6))
def test_the_law_agrees_with_sets(tokens):
    batch = packed(np.array(tokens, np.int16)[:, None])
    fine = all(set(one) == {-1} or (len(set(one)) == 3 and min(one) >= 0) for one in tokens)
    law = DistinctIds(*ROUTED_COLUMNS)
    if fine:
        law.check(batch)
    else:
        with pytest.raises(SchemaError, match=r"^Row 0, "):
            law.check(batch)
