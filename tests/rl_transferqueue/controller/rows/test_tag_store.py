"""`TagStore`: merging tags, reading them by column and by row, clearing rows, and resizing."""

from __future__ import annotations

import numpy as np

from rl_transferqueue.controller.rows.slot_arrays import grown
from rl_transferqueue.controller.rows.tag_store import TagStore
from rl_transferqueue.wire.messages import TagColumn


def store() -> TagStore:
    tags = TagStore(4)
    tags.merge(np.array([0, 2]), [TagColumn("n", (1, 2)), TagColumn("s", ("a",), np.array([1], "<i4").tobytes())])
    return tags


def test_a_tag_that_some_rows_lack_names_its_rows() -> None:
    assert store().of(np.array([0, 2])) == (
        TagColumn("n", (1, 2)),
        TagColumn("s", ("a",), np.array([1], "<i4").tobytes()),
    )
    assert store().of(np.array([2])) == (TagColumn("n", (2,)), TagColumn("s", ("a",)))
    assert store().of(np.array([1])) == ()


def test_none_is_a_value_and_a_cleared_row_has_none() -> None:
    tags = store()
    tags.merge(np.array([0]), [TagColumn("s", (None,))])
    assert tags.of_row(0) == {"n": 1, "s": None}
    tags.clear(np.array([0]))
    assert (tags.of_row(0), tags.of_row(2)) == ({}, {"n": 2, "s": "a"})
    one = np.array([1], "<i4").tobytes()
    assert tags.of(np.array([0, 2])) == (TagColumn("n", (2,), one), TagColumn("s", ("a",), one))


def test_tags_of_later_slots_are_absent_after_a_resize() -> None:
    tags = store()
    tags.resize(8, lambda array: grown(array, 8))
    assert (tags.of_row(2), tags.of_row(7)) == ({"n": 2, "s": "a"}, {})
    tags.merge(np.array([7]), [TagColumn("late", (True,))])
    assert tags.of_row(7) == {"late": True}
    assert tags.of(np.array([7])) == (TagColumn("late", (True,)),)
