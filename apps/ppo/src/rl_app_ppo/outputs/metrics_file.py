"""`metrics.jsonl`: one line per step, cut back when a run resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO, cast

from rl_app_ppo.outputs.run_folder import writing
from rl_protocol import ConfigError
from rl_protocol.support.disk_writes import fsync

_STEPS = 1 << 31
"""No run has so many."""


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The whole lines of a metrics file; empty if there is no file.

    Raises:
        ConfigError: it can't be read, or a line holds something else.
    """
    records: list[dict[str, float]] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                break  # the run was killed while it wrote this line
            records.append(_checked(record))
    except (OSError, ValueError) as error:
        raise ConfigError(f"The metrics {path} can't be read: {error}.") from error
    return records


def _checked(record: Any) -> dict[str, float]:
    """What a line holds, if it is the metrics of a step."""
    numbers = isinstance(record, dict) and all(isinstance(value, int | float) for value in record.values())
    if not numbers or not 0 <= record.get("step", -1) < _STEPS:
        raise ValueError(f"a line is not the metrics of a step: {str(record)[:80]!r}")
    return cast("dict[str, float]", record)


def more_metrics(path: Path, begin: int) -> tuple[list[dict[str, float]], int]:
    """The whole lines of a metrics file from byte `begin`, and where they end.

    Raises:
        OSError: it can't be read.
        ValueError: a line holds something else.
    """
    records: list[dict[str, float]] = []
    with path.open("rb") as file:
        file.seek(begin)
        for line in file:
            if not line.endswith(b"\n"):
                break  # it is being written
            records.append(_checked(json.loads(line)))
            begin += len(line)
    return records, begin


def kept_metrics(path: Path, last_step: int) -> list[dict[str, float]]:
    """Cut a metrics file back to its whole lines up to `last_step`, and return them.

    The later steps will be repeated.
    """
    with writing(path):
        kept = [record for record in read_metrics(path) if record["step"] <= last_step]
        temporary = path.with_name(f".{path.name}")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        fsync(temporary)
        os.replace(temporary, path)  # noqa: PTH105 - see publish_folder
        fsync(path.parent)
    return kept


class JSONLSink:
    """MetricSink that appends one JSON object per step and flushes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            self._file: TextIO | None = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line."""
        if self._file is not None:
            with writing(self._path):
                self._file.write(json.dumps({"step": step, **metrics}) + "\n")
                self._file.flush()

    def close(self) -> None:
        """Close the file; safe to call twice."""
        file, self._file = self._file, None
        if file is not None:
            with writing(self._path):
                file.close()
