"""Dynamic sampling and the overlong penalty of DAPO."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_protocol import ConfigError, RowKey
from rl_trainer.algorithms.dapo import Generate, GiveUp, Train, informative_prompts, next_round, overlong_penalty

pytestmark = pytest.mark.numeric


def test_prompts_whose_sessions_all_score_the_same_are_left_out():
    """Also one with a single session, as where the other ones failed."""
    keys = [RowKey("a", 0), RowKey("a", 1), RowKey("b", 0), RowKey("b", 1), RowKey("c", 0)]
    assert informative_prompts(keys, np.array([1.0, 0.0, 1.0, 1.0, 0.5])) == ["a"]


def test_of_a_session_the_last_trajectory_is_looked_at():
    keys = [RowKey("a", 0, 1), RowKey("a", 0, 0), RowKey("a", 1, 0)]
    assert informative_prompts(keys, np.array([1.0, 0.0, 1.0])) == []
    assert informative_prompts(keys, np.array([0.0, 1.0, 1.0])) == ["a"]


def test_refill_by_hand():
    ask = {"wanted": 8, "max_rounds": 3}
    assert next_round([f"p{i}" for i in range(9)], generated=16, rounds=1, **ask) == Train(
        uids=tuple(f"p{i}" for i in range(8))
    )
    # 2 are missing and 3 of 4 are kept
    assert next_round(["p"] * 6, generated=8, rounds=1, **ask) == Generate(num_prompts=3)
    # 56 would be enough at this rate; 8 is the limit
    assert next_round(["p"], generated=8, rounds=1, **ask) == Generate(num_prompts=8)
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
