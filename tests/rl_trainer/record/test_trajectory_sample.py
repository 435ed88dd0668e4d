"""Which groups of a step are recorded."""

from __future__ import annotations

import pytest

from rl_trainer.record.trajectory_sample import choose

KEYS = [f"{uid}/{session}/0" for uid in "abcdef" for session in (0, 1)]
SCORES = [0.5, 0.5, 0.0, 0.2, 1.0, 1.0, 0.5, 0.6, 0.5, 0.5, 0.4, 0.4]
VERSIONS = [3] * 8 + [1, 3] + [3] * 2  # e has the oldest
GAPS = [0.0] * 10 + [0.0, 2.0]  # f has the largest


def names(choices):
    return [(KEYS[choice.rows[0]][0], choice.why) for choice in choices]


def test_groups_are_whole_and_each_has_its_reason():
    for seed in range(20):
        chosen = choose(KEYS, SCORES, VERSIONS, GAPS, 12, (seed, 1))
        assert [why for _, why in names(chosen)][:3] == ["worst", "best", "random"]
        assert names(chosen)[:2] == [("b", "worst"), ("c", "best")]
        assert sorted(row for choice in chosen for row in choice.rows) == list(range(12))
        random = names(chosen)[2][0]
        assert names(chosen)[3] == ("e", "stale") or random == "e"
        assert ("f", "gap") in names(chosen) or random == "f" or ("f", "stale") in names(chosen)


def test_the_seed_and_the_step_decide_and_nothing_else():
    same = {tuple(names(choose(KEYS, SCORES, [], [], 6, (7, 3)))) for _ in range(3)}
    others = {tuple(names(choose(KEYS, SCORES, [], [], 6, (7, step)))) for step in range(20)}
    assert len(same) == 1
    assert len(others) > 1


@pytest.mark.parametrize(("count", "groups"), [(1, 1), (2, 1), (3, 1), (4, 2), (100, 6)])
def test_at_most_so_many_rows_but_at_least_one_group(count, groups):
    assert len(choose(KEYS, SCORES, [], [], count, (0, 1))) == groups


def test_nothing_is_chosen_from_nothing():
    assert choose([], [], [], [], 4, (0, 1)) == []
