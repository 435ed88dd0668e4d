"""Which trajectories of a long record are kept, in whatever order its files are read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from recorded import trajectory

from rl_trainer.record.kept_trajectories import KeptTrajectories
from rl_trainer.record.record_rows import StartRow


def steps(kept: KeptTrajectories) -> list[int]:
    return [row.step for row in kept.rows()]


def test_evenly_spread_steps_and_the_newest_are_kept():
    """Of 10 tokens a step, 50 have room: from 6 steps on every second, from 11 on every fourth."""
    kept, found = KeptTrajectories(50), {}
    for step in range(1, 24):
        kept.add(trajectory(step, tokens=10))
        found[step] = steps(kept)
    assert found[5] == [1, 2, 3, 4, 5]
    assert found[6] == [2, 4, 6]
    assert found[7] == [2, 4, 6, 7]
    assert found[10] == [2, 4, 6, 8, 10]
    assert found[11] == [4, 8, 11]
    assert found[23] == [8, 16, 23]
    assert kept.every == 8


def test_a_step_that_is_larger_than_all_room_is_kept():
    kept = KeptTrajectories(5)
    kept.add(trajectory(1, tokens=10))
    assert steps(kept) == [1]
    kept.add(trajectory(2, tokens=10))
    assert steps(kept) == [2]


def test_the_newest_step_of_an_attempt_that_repeats_steps_is_kept():
    kept = KeptTrajectories(30)
    for step in (1, 2, 3, 4, 5):
        kept.add(trajectory(step, tokens=10))
    assert steps(kept) == [2, 4, 5]
    kept.begin_again(StartRow(at=100.0, after=2, steps=9))
    kept.add(trajectory(3, at=103.0, tokens=10))
    assert steps(kept) == [2, 3]
    kept.add(trajectory(4, at=104.0, tokens=10))
    assert steps(kept) == [2, 4]


def test_without_a_limit_everything_is_kept():
    kept = KeptTrajectories()
    for step in range(1, 100):
        kept.add(trajectory(step, tokens=10))
    assert (len(kept.rows()), kept.every) == (99, 1)


ATTEMPTS = [
    *(trajectory(step, at=float(step)) for step in (1, 2, 3)),
    StartRow(at=10.0, after=1, steps=9),
    *(trajectory(step, at=10.0 + step) for step in (2, 3, 4)),
    StartRow(at=20.0, after=3, steps=9),
    *(trajectory(step, at=20.0 + step) for step in (4, 5)),
]


@given(st.permutations(ATTEMPTS))
def test_the_order_of_reading_changes_nothing(rows):
    kept = KeptTrajectories()
    for row in rows:
        if isinstance(row, StartRow):
            kept.begin_again(row)
        else:
            kept.add(row)
    assert [(row.step, row.at) for row in kept.rows()] == [(1, 1.0), (2, 12.0), (3, 13.0), (4, 24.0), (5, 25.0)]


@given(st.permutations(ATTEMPTS), st.sampled_from([None, 1, 3, 5, 9]))
def test_one_step_alone_is_kept_and_all_steps_are_known(rows, step):
    kept = KeptTrajectories(step=step)
    for row in rows:
        if isinstance(row, StartRow):
            kept.begin_again(row)
        else:
            kept.add(row)
    assert kept.steps == [1, 2, 3, 4, 5]
    assert steps(kept) == [one for one in (1, 2, 3, 4, 5) if step in {None, one}]


def test_a_step_that_is_not_repeated_is_not_known():
    kept = KeptTrajectories(1)
    for one in (1, 2, 3):
        kept.add(trajectory(one, at=float(one)))
    kept.begin_again(StartRow(at=10.0, after=1, steps=9))
    kept.add(trajectory(2, at=12.0))
    assert kept.steps == [1, 2]
    assert steps(kept) == [2]
