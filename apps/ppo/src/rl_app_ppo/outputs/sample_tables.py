"""Tables of sampled trajectories for loggers, read from the record of a run while it grows."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

from rl_trainer.record.record_file import SUFFIX, read_file
from rl_trainer.record.record_rows import TrajectoryRow

Cell: TypeAlias = str | float | int | None
COLUMNS = (
    *("step", "key", "why", "prompt", "response", "ground_truth"),
    *("reward", "parts", "advantage", "tokens", "turns", "failure"),
)
FAILED = "failed"
"""Why a trajectory is recorded whose reward function failed, before its step is computed."""


@dataclass(frozen=True, slots=True)
class SampleTable:
    """The recorded trajectories of a step; each row has a cell for each of COLUMNS."""

    step: int
    rows: Sequence[Sequence[Cell]]


@runtime_checkable
class SampleSink(Protocol):
    """A MetricSink that also takes tables."""

    def log_samples(self, table: SampleTable) -> None:
        """Record one table; its step may be earlier than that of the last metrics."""
        ...


class SampleTables:
    """Follows the record of a run, and returns each step's trajectories once.

    The workers write them to files some time after the step; the driver sends none.

    Args:
        record: folder of the record. What was written before this object was made is left out: it
            belongs to an earlier attempt.
    """

    def __init__(self, record: Path) -> None:
        self._record = record
        self._began = time.time()
        self._read: dict[Path, int] = {}
        self._waiting: dict[int, list[TrajectoryRow]] = {}

    def new(self, *, done: bool = False) -> list[SampleTable]:
        """The tables of steps that are recorded as a whole, because a later one is, or with `done`
        all that are left.

        Raises:
            OSError: a file can't be read.
            msgspec.DecodeError: a file holds something else.
        """
        for path in sorted(self._record.glob(f"*{SUFFIX}")):
            rows, self._read[path] = read_file(path, self._read.get(path, 0))
            for row in rows:
                if isinstance(row, TrajectoryRow) and row.at >= self._began:
                    self._waiting.setdefault(row.step, []).append(row)
        chosen = [step for step, rows in self._waiting.items() if any(row.why != FAILED for row in rows)]
        newest = max(chosen, default=0)
        whole = sorted(step for step in self._waiting if done or step < newest)
        return [SampleTable(step, [_cells(row) for row in self._waiting.pop(step)]) for step in whole]


def _cells(row: TrajectoryRow) -> tuple[Cell, ...]:
    parts = {name: value for name, value in {**row.reward, **row.texts}.items() if name != "score"}
    advantages = zip(row.advantages, row.response_mask, strict=True) if row.advantages else ()
    trained = [value for value, mask in advantages if mask and value is not None]
    return (
        *(row.step, row.key, row.why, row.prompt, row.response, row.ground_truth),
        row.reward.get("score"),
        json.dumps(parts, ensure_ascii=False),
        sum(trained) / len(trained) if trained else None,
        *(len(row.response_ids), row.turns, row.failure),
    )
