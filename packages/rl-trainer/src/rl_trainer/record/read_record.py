"""Reads the record of a run, also while it grows and after its processes were killed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rl_trainer.record.record_file import SUFFIX, read_file
from rl_trainer.record.record_rows import (
    AlarmRow,
    EndRow,
    PhaseRow,
    RecordRow,
    RuleRow,
    SpanRow,
    StartRow,
    StepRow,
    TokensRow,
    TrajectoryRow,
)


@dataclass(kw_only=True)
class Record:
    """What a run has recorded, without what a resumed run has repeated; each list by time."""

    starts: list[StartRow] = field(default_factory=list[StartRow])
    phases: list[PhaseRow] = field(default_factory=list[PhaseRow])
    steps: list[StepRow] = field(default_factory=list[StepRow])
    alarms: list[AlarmRow] = field(default_factory=list[AlarmRow])
    spans: list[SpanRow] = field(default_factory=list[SpanRow])
    trajectories: list[TrajectoryRow] = field(default_factory=list[TrajectoryRow])
    end: EndRow | None = None
    """None: the run goes on, or was killed."""
    rule: str = ""
    """How trajectories were chosen."""
    tokens: dict[int, str] = field(default_factory=dict[int, str])
    """Text of each token id."""


def read_record(folder: Path) -> Record:
    """Read all files of a record; empty if there are none.

    Raises:
        OSError: a file can't be read.
        msgspec.DecodeError: a file holds something else.
    """
    rows = [row for path in sorted(folder.glob(f"*{SUFFIX}")) for row in read_file(path)]
    rows.sort(key=lambda row: row.at)
    record = Record()
    seen: dict[tuple[int, str], TrajectoryRow] = {}
    for row in rows:
        if isinstance(row, StartRow):
            _begin_again(record, seen, row)
        elif isinstance(row, TrajectoryRow):
            seen[row.step, row.key] = row
        else:
            _add(record, row)
    record.trajectories = list(seen.values())
    return record


def _begin_again(record: Record, seen: dict[tuple[int, str], TrajectoryRow], start: StartRow) -> None:
    """Forget the steps that an attempt repeats."""
    record.starts.append(start)
    record.end = None
    record.steps = [row for row in record.steps if row.step <= start.after]
    for step, key in list(seen):
        if step > start.after:
            del seen[step, key]


def _add(record: Record, row: RecordRow) -> None:
    match row:
        case PhaseRow():
            record.phases.append(row)
        case StepRow():
            record.steps.append(row)
        case AlarmRow():
            record.alarms.append(row)
        case SpanRow():
            record.spans.append(row)
        case EndRow():
            record.end = row
        case RuleRow():
            record.rule = row.text
        case TokensRow():
            record.tokens |= row.texts
        case _:
            raise AssertionError(f"{type(row).__name__} is added by read_record")
