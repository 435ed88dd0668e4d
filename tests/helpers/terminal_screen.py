"""What a terminal shows, with its scrollback, of the control sequences that rich writes."""

from __future__ import annotations

import re

_PART = re.compile(r"\x1b\[(?P<number>[0-9;?]*)(?P<command>[A-Za-z])|(?P<text>[^\x1b\r\n]+)|(?P<control>[\r\n])")


class TerminalScreen:
    """Rows of text that are written at a cursor; all rows are kept, as in the scrollback."""

    def __init__(self) -> None:
        self.rows = [""]
        self.row = 0
        self.column = 0
        self.highest = 0
        """Most rows that the cursor went up from the last one: what was drawn over."""

    @property
    def text(self) -> str:
        return "\n".join(row.rstrip() for row in self.rows).rstrip()

    def write(self, text: str) -> None:
        """Show a text that ends with a whole control sequence."""
        for part in _PART.finditer(text):
            if part["text"]:
                self._put(part["text"])
            elif part["control"] == "\r":
                self.column = 0
            elif part["control"] == "\n":
                self.row, self.column = self.row + 1, 0
                if self.row == len(self.rows):
                    self.rows.append("")
            elif part["command"] == "A":
                self.row -= int(part["number"] or 1)
                assert self.row >= 0
                self.highest = max(self.highest, len(self.rows) - 1 - self.row)
            elif part["command"] == "K":
                assert part["number"] == "2"
                self.rows[self.row] = ""

    def _put(self, text: str) -> None:
        row = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = row[: self.column] + text + row[self.column + len(text) :]
        self.column += len(text)
