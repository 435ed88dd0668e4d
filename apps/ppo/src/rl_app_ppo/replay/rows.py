"""Prints rows of a kept batch: the values of its fields, and token ids as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rl_protocol import BatchData, ConfigError, RowKey
from rl_trainer.checkpoints.kept_batches import PROMPTS, ROWS, KeptBatch

TOKENS = ("prompts", "responses")
"""Fields of token ids; each has its text as a further field, such as `responses_text`."""
Decode = Callable[[Sequence[int]], str]
"""Token ids to text with special tokens."""


def chosen_rows(batch: KeptBatch, row: str) -> list[int]:
    """Places of the rows that `--row` names: a key, or a number from 0; empty: all.

    Raises:
        ConfigError: there is no such row.
    """
    keys = batch.rows.keys
    if not row:
        return list(range(len(keys)))
    if row in keys:
        return [keys.index(row)]
    if row.isdecimal() and int(row) < len(keys):
        return [int(row)]
    some = f"one of {keys[0]}..{keys[-1]}, or a number from 0 to {len(keys) - 1}" if keys else "of a step with rows"
    raise ConfigError(f"--row must be a row of step {batch.step}, {some}; got {row!r}.")


def row_values(
    batch: KeptBatch, data: Mapping[str, BatchData], row: str, field: str, decode: Decode
) -> dict[str, dict[str, Any]]:
    """The fields of rows, by key and name, as plain values.

    Args:
        batch: what the step has trained on.
        data: its columns, by file.
        row: see `chosen_rows`.
        field: the one field; empty: all.
        decode: token ids to text.

    Raises:
        ConfigError: there is no such row or field.
    """
    prompts = {uid: place for place, uid in enumerate(batch.prompts.keys)}
    found = dict[str, dict[str, Any]]()
    for place in chosen_rows(batch, row):
        key = batch.rows.keys[place]
        values = _fields(data[PROMPTS], prompts[RowKey.parse(key).uid]) | _fields(data[ROWS], place)
        values |= {f"{name}_text": decode(values[name]) for name in TOKENS if name in values}
        values |= {f"tag/{name}": value for name, value in batch.rows.tags[place].items()}
        if field and field not in values:
            raise ConfigError(f"--field must be a field of the batch, of {', '.join(values)}; got {field!r}.")
        found[key] = {field: values[field]} if field else values
    return found


def _fields(data: BatchData, place: int) -> dict[str, Any]:
    return {name: _plain(column.row(place)) for name, column in data.columns.items()}


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def rows_text(found: Mapping[str, Mapping[str, Any]], field: str) -> str:
    """Rows for a terminal: one line per row with one field, otherwise one per field. Control
    characters are escaped.
    """
    if field:
        return _lines({key: values[field] for key, values in found.items()})
    return "".join(
        f"{key}\n" + _lines({f"  {name}": value for name, value in values.items()}) for key, values in found.items()
    )


def _lines(values: Mapping[str, Any]) -> str:
    width = max(map(len, values), default=0)
    return "".join(f"{name:<{width}}  {shown(value)}\n" for name, value in values.items())


def shown(value: object) -> str:
    r"""A value as text without characters that control a terminal.

    >>> print(shown("a\x1b[2J\u202e"))
    'a\x1b[2J\u202e'
    """
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in repr(value))
