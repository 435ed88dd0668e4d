"""Numbers with their nouns."""

from __future__ import annotations

from rl_protocol.counted import counted


def test_one_has_no_s() -> None:
    assert [counted(number, "row") for number in (0, 1, 2, 1000)] == ["0 rows", "1 row", "2 rows", "1000 rows"]
