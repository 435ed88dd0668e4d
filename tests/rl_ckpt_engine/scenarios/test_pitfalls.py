"""The tests named in PITFALLS.md exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
ROWS = re.findall(r"^\| (P\d+) \| .+ \| (`.+`) \|$", (HERE / "PITFALLS.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_tests_of_a_pitfall_exist(row: tuple[str, str]) -> None:
    for place, test in (name.split("::") for name in re.findall(r"`([^`]+)`", row[1])):
        assert test in {
            node.name for node in ast.parse((HERE / place).read_text()).body if isinstance(node, ast.FunctionDef)
        }


def test_there_are_pitfalls() -> None:
    assert len(ROWS) >= 19
