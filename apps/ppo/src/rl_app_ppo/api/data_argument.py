"""The data of `train()`: files, rows in a list, or a Hugging Face data set."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeGuard, cast, runtime_checkable

from rl_app_ppo.api.content_folder import keep
from rl_protocol import ConfigError


@runtime_checkable
class Table(Protocol):
    """Rows that can be written as parquet, such as a `datasets.Dataset` or a `pandas.DataFrame`."""

    def to_parquet(self, path: str, /) -> object:
        """Write all rows to a file."""
        ...


Data = str | Path | Sequence[str | Path] | Sequence[Mapping[str, Any]] | Table
"""Files as in `data.train_files`, rows in the format of the files, or a table of such rows."""
_JSONL, _PARQUET = "rows.jsonl", "rows.parquet"


def check_data(name: str, data: object) -> None:
    """Check the argument `name` without writing anything.

    Raises:
        ConfigError: it is empty, or of another type; names the argument and the first wrong item.
    """
    if isinstance(data, str | Table):
        return
    if isinstance(data, Path):
        data = [data]
    if not isinstance(data, Sequence) or isinstance(data, bytes):
        raise ConfigError(
            f"{name} must be a file, a list of files, a list of rows (dicts), or a datasets.Dataset; got {type(data).__name__}."
        )
    items = cast("Sequence[object]", data)
    if not items:
        raise ConfigError(f"{name} is empty; give at least one file or row.")
    kind = (str, Path) if isinstance(items[0], str | Path) else (Mapping,)
    for index, item in enumerate(items):
        if not isinstance(item, kind):
            expected = "a file, as the items before it" if Mapping not in kind else "a row (a dict)"
            raise ConfigError(f"{name}[{index}] must be {expected}; got {type(item).__name__}.")
        if isinstance(item, Mapping):
            _encoded(name, index, cast("Mapping[str, Any]", item))
        elif "," in str(item):
            raise ConfigError(f"{name}: the path {str(item)!r} has a comma, which separates files; rename the file.")


def data_files(name: str, data: Data, cache: Path | None) -> str:
    """The value of `data.train_files` or `data.val_files`.

    Args:
        name: the argument.
        data: its value, checked.
        cache: folder into which rows are written; None: they are not, and the name of the argument
            stands for their file.

    Raises:
        OutputError: the cache can't be written.
    """
    if isinstance(data, str | Path):
        return str(data)
    if not isinstance(data, Table) and not _is_rows(data):
        return ",".join(map(str, data))
    if cache is None:
        return name
    if isinstance(data, Table):
        return str(keep(cache, "dataset", lambda folder: data.to_parquet(str(folder / _PARQUET))) / _PARQUET)
    lines = [_encoded(name, index, row) + "\n" for index, row in enumerate(data)]
    return str(keep(cache, "dataset", lambda folder: (folder / _JSONL).write_text("".join(lines), "utf-8")) / _JSONL)


def _is_rows(data: Sequence[str | Path] | Sequence[Mapping[str, Any]]) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    return isinstance(data[0], Mapping)


def _encoded(name: str, index: int, row: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(row), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{name}[{index}] can't be written as JSON: {error}. Rows hold text, numbers, lists and dicts; give a datasets.Dataset for others, "
            "such as images."
        ) from error
