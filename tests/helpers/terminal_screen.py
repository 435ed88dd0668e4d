"""What a terminal shows, with its scrollback, of the control sequences that rich writes."""

from __future__ import annotations

import re
from itertools import groupby
from operator import itemgetter

_PART = re.compile(r"\x1b\[(?P<number>[0-9;?]*)(?P<command>[A-Za-z])|(?P<text>[^\x1b\r\n]+)|(?P<control>[\r\n])")

Row = list[tuple[str, str]]
"""Letter and style of each column; a style is the numbers of a control sequence."""


class TerminalScreen:
    """Rows of text that are written at a cursor; all rows are kept, as in the scrollback."""

    def __init__(self) -> None:
        self.cells: list[Row] = [[]]
        self.row = 0
        self.column = 0
        self.style = ""
        self.highest = 0
        """Most rows that the cursor went up from the last one: what was drawn over."""

    @property
    def rows(self) -> list[str]:
        return ["".join(letter for letter, _ in row) for row in self.cells]

    @property
    def text(self) -> str:
        return "\n".join(row.rstrip() for row in self.rows).rstrip()

    @property
    def styled(self) -> list[str]:
        """The rows with control sequences for their styles."""
        return [
            "".join(f"\x1b[0;{style}m{''.join(map(itemgetter(0), run))}" for style, run in groupby(row, itemgetter(1)))
            for row in self.cells
        ]

    def write(self, text: str) -> None:
        """Show a text that ends with a whole control sequence."""
        for part in _PART.finditer(text):
            if part["text"]:
                self._put(part["text"])
            elif part["control"] == "\r":
                self.column = 0
            elif part["control"] == "\n":
                self.row, self.column = self.row + 1, 0
                if self.row == len(self.cells):
                    self.cells.append([])
            elif part["command"] == "A":
                self.row -= int(part["number"] or 1)
                assert self.row >= 0
                self.highest = max(self.highest, len(self.cells) - 1 - self.row)
            elif part["command"] == "K":
                assert part["number"] == "2"
                self.cells[self.row] = []
            elif part["command"] == "m":
                self.style = "" if part["number"] in ("", "0") else part["number"]

    def _put(self, text: str) -> None:
        row = self.cells[self.row]
        row += [(" ", "")] * (self.column - len(row))
        row[self.column : self.column + len(text)] = [(letter, self.style) for letter in text]
        self.column += len(text)
