"""Lines of aligned columns."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]]) -> str:
    """One line per row; each column but the last is as wide as its longest text.

    >>> columns([("a", "b"), ("long", "c")])
    'a     b\\nlong  c\\n'
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    return "".join(
        "  ".join([*(f"{text:<{width}}" for text, width in zip(row[:-1], widths, strict=True)), row[-1]]).rstrip()
        + "\n"
        for row in rows
    )
