"""`ColumnPlaces`: which columns share cells, what rows have in common, and lost columns."""

from __future__ import annotations

import numpy as np

from rl_transferqueue.controller.rows.column_places import ColumnPlaces, Places

ALL = np.arange(3)


def placed() -> ColumnPlaces:
    columns = ColumnPlaces(4)
    columns.place(("x", "y"), ALL, 7)
    return columns


def plain(places: Places) -> list[tuple[list[int], int]]:
    return [(slots.tolist(), columns) for slots, columns in places]


def test_columns_share_their_cells_until_one_is_written_alone() -> None:
    columns = placed()
    assert columns.cells["x"] is columns.cells["y"]
    assert plain(columns.place(("y",), np.array([1]), 9)) == [([7], 1)]
    assert columns.cells["x"] is not columns.cells["y"]
    assert columns.cells["x"].block.tolist() == [7, 7, 7, 0]
    assert columns.cells["y"].block.tolist() == [7, 9, 7, 0]
    assert columns.cells["y"].row.tolist()[:3] == [0, 0, 2]


def test_what_rows_have_and_what_they_have_in_common() -> None:
    columns = placed()
    columns.place(("z",), np.array([1]), 9)
    assert columns.common(ALL) == ("x", "y")
    assert columns.common(np.array([1])) == ("x", "y", "z")
    assert columns.common(ALL[:0]) == ()
    assert columns.produced(ALL, ("z", "x", "never")).tolist() == [
        [False, True, False],
        [True, True, False],
        [False, True, False],
    ]


def test_a_removed_row_says_where_its_cells_lay() -> None:
    columns = placed()
    assert plain(columns.remove(np.array([0, 2]), ("a", "c"))) == [([7, 7], 2)]
    assert plain(columns.remove(np.array([0, 2]), ("a", "c"))) == [([], 2)]


def test_a_block_that_moves_keeps_the_order_of_its_rows() -> None:
    columns = placed()
    columns.remove(np.array([1]), ("b",))
    assert columns.move(7, np.array([0, 2]), 8) == 4
    assert columns.cells["x"].block.tolist() == [8, 0, 8, 0]
    assert columns.cells["x"].row.tolist()[::2] == [0, 1]


def test_lost_columns_are_listed_until_they_are_written_or_cleared() -> None:
    columns = placed()
    names = ("a", "b", "c")
    assert columns.lose(np.array([7]), lambda slots: [names[i] for i in slots]).tolist() == [0, 1, 2]
    assert columns.lost == {name: {"x", "y"} for name in names}
    columns.recover(("a", "b"), ("x",))
    columns.recover(("a",), ("y",))
    columns.remove(np.array([2]), ("c",))
    assert columns.lost == {"b": {"y"}}


def test_columns_that_no_live_row_has_are_dropped() -> None:
    columns = placed()
    columns.place(("z",), np.array([1]), 9)
    columns.drop_unused(np.array([0, 2]))
    assert list(columns.cells) == ["x", "y"]
