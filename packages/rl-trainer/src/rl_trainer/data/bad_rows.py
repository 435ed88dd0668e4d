"""Collects invalid rows of data files and reports them grouped by fault, one line per fault."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rl_protocol import SchemaError
from rl_protocol.counted import counted

ROW_FORMAT = '{"prompt": [{"role": "user", "content": "..."}], "reward_model": {"ground_truth": "..."}}'
"""Required fields of a row, for messages."""
_NAMED = 20
"""Largest number of faults that are reported; all rows are counted."""
_EXAMPLE_CHARACTERS = 200
_REASON_CHARACTERS = 2000
"""Messages are cut to this length before matching _VARIABLE, which takes quadratic time."""
_VARIABLE = re.compile(r"fields found: .*|'[^']*'|\([^)]*\)|\d+")
"""Parts of a message that differ between rows with the same fault."""
PROMPT_NAMES = ("question", "problem", "query", "input", "instruction", "messages", "conversation", "text", "content")
"""Names of the prompt field in other data sets, most likely first."""
ANSWER_NAMES = ("ground_truth", "answer", "final_answer", "solution", "target", "label", "expected", "output")
"""Names of the field with the right answer in other data sets, most likely first."""


class MissingFieldsError(SchemaError):
    """A row lacks required fields.

    Args:
        message: what is missing, and what was found.
        missing: names of the missing fields.
        found: names of the row's fields.
    """

    missing: tuple[str, ...]
    found: tuple[str, ...]


@dataclass
class _Group:
    """Rows with the same fault."""

    reason: str
    """Of the first row."""
    place: str
    """Of the first row."""
    example: str
    error: SchemaError
    count: int = 0
    files: Counter[Path] = field(default_factory=Counter[Path])

    def line(self, rows_of_files: Mapping[Path, int]) -> str:
        if self.count == 1:
            return f"{self.place}: {self.reason}"
        whole = [path for path, count in self.files.items() if count == rows_of_files[path]]
        if len(whole) == len(self.files):
            where = f"all {self.count} rows of {', '.join(map(str, whole))}"
        else:
            where = f"{self.count} rows, the first {self.place}"
        return f"{where}: {self.reason}{f'; example: {self.example}' if self.example else ''}"


class BadRows:
    """Collects bad rows; memory use does not grow with their number."""

    def __init__(self) -> None:
        self.count = 0
        self.rows_of_files: Counter[Path] = Counter()
        """Rows read from each file, good or bad; the caller counts them."""
        self._groups: dict[str, _Group] = {}
        self._more = 0
        """Rows with faults beyond the first _NAMED."""

    def add(self, path: Path, place: str, error: SchemaError, raw: object = None) -> None:
        """Add a row: `place` says where it is; `raw` is the row, if it could be read."""
        self.count += 1
        reason = str(error)[:_REASON_CHARACTERS]
        kind = _VARIABLE.sub("", reason)
        if kind not in self._groups:
            if len(self._groups) == _NAMED:
                self._more += 1
                return
            self._groups[kind] = _Group(reason, place, _example(raw), error)
        group = self._groups[kind]
        group.count += 1
        group.files[path] += 1

    def lines(self) -> tuple[str, ...]:
        """One line per fault, most frequent first: count, first place, reason, example."""
        groups = sorted(self._groups.values(), key=lambda group: -group.count)
        more = (f"{counted(self._more, 'row')} with other faults",) if self._more else ()
        return (*(group.line(self.rows_of_files) for group in groups), *more)

    def remedy(self, prompt_key: str, *, can_skip: bool) -> str:
        """What the user can do, as sentences; `can_skip`: there are valid rows besides them."""
        missing = [group.error for group in self._groups.values() if isinstance(group.error, MissingFieldsError)]
        renamed = _renamed(missing, prompt_key, PROMPT_NAMES, "prompt_key", "prompt")
        renamed += _renamed(missing, "reward_model", ANSWER_NAMES, "ground_truth_key", "right answer")
        shape = f" A row is {ROW_FORMAT}." if missing else ""
        skip = ", or set DataFiles.on_bad_row=skip to train without these rows" if can_skip else ""
        return f"{renamed}Fix the files{skip}.{shape}"


def _renamed(
    missing: Sequence[MissingFieldsError], lacking: str, names: Sequence[str], parameter: str, meaning: str
) -> str:
    found = [name for error in missing if lacking in error.missing for name in names if name in error.found]
    return f"Set DataFiles.{parameter}={found[0]} if that field is the {meaning}. " if found else ""


def _example(raw: object) -> str:
    """The start of a row as JSON."""
    if not isinstance(raw, Mapping):
        return ""
    try:
        text = msgspec.json.encode(raw, enc_hook=repr).decode()
    except (TypeError, ValueError, RecursionError):  # not representable in JSON
        return ""
    return text if len(text) <= _EXAMPLE_CHARACTERS else f"{text[:_EXAMPLE_CHARACTERS]}..."
