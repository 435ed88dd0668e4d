"""Public signatures change only together with their snapshot."""

from __future__ import annotations

import difflib

import pytest
from packages import PACKAGES
from signatures import FOLDER, describe, text


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_the_public_signatures_are_those_of_the_snapshot(package: str):
    path = FOLDER / f"{package}.txt"
    kept = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    changed = list(difflib.unified_diff(kept, text(package).splitlines(), "snapshot", "code", lineterm="", n=0))
    remedy = "If the change is meant: uv run --group dev just signatures, and a changelog line."
    assert not changed, "\n".join([*changed, remedy])


class Example:
    """A class with one of each."""

    def __init__(self, size: int, *, name: str = "x", where: object = object()) -> None:
        self.size, self.name, self.where = size, name, where

    @property
    def half(self) -> float:
        return self.size / 2

    @classmethod
    def empty(cls) -> Example:
        return cls(0)

    async def fetch(self, *keys: str) -> list[str]:
        return list(keys)


def test_what_a_snapshot_says_of_a_class():
    assert list(describe("Example", Example)) == [
        "class Example(size: int, *, name: str = 'x', where: object = ...) -> None",
        "    classmethod empty(cls) -> Example",
        "    async fetch(self, *keys: str) -> list[str]",
        "    half: float",
    ]
