"""The names of metrics in the table of rl-trainer's docs/metrics.md."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

TABLE = Path(__file__).parents[2] / "packages" / "rl-trainer" / "docs" / "metrics.md"


def documented() -> Iterator[str]:
    """Yield patterns of the names.

    `a/{b,c}` stands for two names, `<x>` for any word.
    """
    for name in re.findall(r"`([\w/.<>@*{},-]+)`", TABLE.read_text()):
        choices = [part.strip("{}").split(",") for part in re.findall(r"{[^}]*}|[^{}]+", name)]
        for plain in map("".join, itertools.product(*choices)):
            yield re.sub(r"<\w+>", "[^/]+", plain.replace("*", "[^/]+"))


def assert_documented(metrics: Iterable[str]) -> None:
    """Check that each name is in the table."""
    patterns = re.compile("|".join(f"(?:{pattern})" for pattern in documented()))
    assert [name for name in metrics if not patterns.fullmatch(name)] == []
