"""`ChangeLog`: the order of changes, removed keys, and how many of them are remembered."""

from __future__ import annotations

import numpy as np
import pytest

from rl_transferqueue.controller.rows.change_log import ChangeLog

ALIVE = np.array([True, True, True, False])


def test_rows_come_in_the_order_of_their_last_change() -> None:
    log = ChangeLog(4, version=1)
    log.touch(np.array([0, 1, 2]), 2)
    log.touch(np.array([0, 3]), 3)
    assert log.changed(0, ALIVE).tolist() == [1, 2, 0]
    assert log.changed(2, ALIVE).tolist() == [0]
    assert log.version == 3


def test_a_removed_key_is_named_once_unless_it_is_present_again() -> None:
    log = ChangeLog(4, version=1)
    for version, key in enumerate(("a", "b", "a"), 2):
        log.touch(np.array([0]), version)
        log.add_removed([key], rows_left=0)
    assert log.removed(1, ()) == ["a", "b"]
    assert log.removed(1, {"a"}) == ["b"]
    assert log.removed(3, ()) == ["a"]


def test_the_oldest_removed_keys_are_forgotten_and_this_is_known() -> None:
    log = ChangeLog(4, version=1)
    assert log.knows(1)
    for version in range(2, 5002):
        log.touch(np.array([0]), version)
        log.add_removed(["k"], rows_left=0)
    assert not log.knows(1)
    assert log.knows(4000)
    assert not log.knows(0)


def test_long_keys_are_forgotten_sooner() -> None:
    log = ChangeLog(4, version=1)
    log.touch(np.array([0]), 2)
    log.add_removed(["k" * (1 << 20)], rows_left=0)
    assert (log.knows(1), log.removed(0, ())) == (False, [])


@pytest.mark.parametrize("size", [1, 200])
@pytest.mark.parametrize("count", [1, 4_095, 4_096, 4_097, 9_000])
def test_keys_removed_together_are_remembered_as_those_removed_one_by_one(count: int, size: int) -> None:
    together, alone = ChangeLog(4, version=1), ChangeLog(4, version=1)
    keys = [f"{number:0{size}}" for number in range(count)]
    for log in (together, alone):
        log.touch(np.array([0]), 2)
        log.add_removed(["first"], rows_left=0)
        log.touch(np.array([0]), 3)
    together.add_removed(keys, rows_left=0)
    for key in keys:
        alone.add_removed([key], rows_left=0)
    assert [together.removed(since, ()) for since in (0, 2)] == [alone.removed(since, ()) for since in (0, 2)]
    assert [together.knows(since) for since in (1, 2, 3)] == [alone.knows(since) for since in (1, 2, 3)]
