"""Reads the record of a run, also while it grows and after its processes were killed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rl_trainer.record.attempt_times import AttemptTimes, reading_order
from rl_trainer.record.kept_trajectories import KeptTrajectories
from rl_trainer.record.record_file import SUFFIX, read_blocks
from rl_trainer.record.record_rows import (
    AlarmRow,
    CallRow,
    EndRow,
    PhaseRow,
    RecordRow,
    RuleRow,
    SpanRow,
    StartRow,
    StepRow,
    SyncRow,
    TokensRow,
    TrajectoryRow,
)

BUILD = "build"
"""The first call to a worker process."""


@dataclass(kw_only=True)
class Record:
    """What a run has recorded, without what a resumed run has repeated; each list by time."""

    starts: list[StartRow] = field(default_factory=list[StartRow])
    phases: list[PhaseRow] = field(default_factory=list[PhaseRow])
    steps: list[StepRow] = field(default_factory=list[StepRow])
    alarms: list[AlarmRow] = field(default_factory=list[AlarmRow])
    spans: list[SpanRow] = field(default_factory=list[SpanRow])
    calls: list[CallRow] = field(default_factory=list[CallRow])
    """Calls that workers have not answered yet."""
    syncs: list[SyncRow] = field(default_factory=list[SyncRow])
    trajectories: list[TrajectoryRow] = field(default_factory=list[TrajectoryRow])
    every: int = 1
    """The trajectories are those of steps that are multiples of it, and of the last step."""
    trajectory_steps: list[int] = field(default_factory=list[int])
    """Steps that have trajectories, whether they are in `trajectories` or not."""
    end: EndRow | None = None
    """None: the run goes on, or was killed."""
    rule: str = ""
    """How trajectories were chosen."""
    tokens: dict[int, str] = field(default_factory=dict[int, str])
    """Text of each token id."""


def read_record(folder: Path, most_tokens: int | None = None, *, step: int | None = None) -> Record:
    """Read all files of a record; empty if there are none.

    Args:
        folder: of the record.
        most_tokens: as in RecordReader.
        step: as in RecordReader.

    Raises:
        OSError: a file can't be read.
        msgspec.DecodeError: a file holds something else.
    """
    return RecordReader(folder, most_tokens=most_tokens, step=step).read()


class RecordReader:
    """Follows a record while it grows: `read` reads only what was appended since.

    Args:
        folder: of the record.
        recent_s: to follow a long run in little memory: leave out trajectories, and keep the spans
            of the last `recent_s` seconds, the last one of each worker, and the last sync; None:
            keep everything.
        most_tokens: response tokens of the trajectories to keep, as in KeptTrajectories.
        step: keep the trajectories of this step alone; None: of every step.
    """

    def __init__(
        self,
        folder: Path,
        *,
        recent_s: float | None = None,
        most_tokens: int | None = None,
        step: int | None = None,
    ) -> None:
        self._folder = folder
        self._recent_s = recent_s
        self._read: dict[Path, int] = {}
        self._times = AttemptTimes()
        self._record = Record()
        self._kept = KeptTrajectories(most_tokens, step=step)

    def read(self) -> Record:
        """The record up to now; the same object each time.

        Raises:
            OSError: a file can't be read.
            msgspec.DecodeError: a file holds something else.
        """
        rows: list[RecordRow] = []
        for path in sorted(self._folder.glob(f"*{SUFFIX}"), key=reading_order):
            for block, end in read_blocks(path, self._read.get(path, 0)):
                self._read[path] = end
                for row in (self._times.moved(row, path) for row in block):
                    if not isinstance(row, TrajectoryRow):
                        rows.append(row)
                    elif self._recent_s is None:
                        self._kept.add(row)
        rows.sort(key=lambda row: row.at)
        for row in rows:
            if isinstance(row, StartRow):
                self._begin_again(row)
            else:
                _add(self._record, row)
        self._record.trajectories, self._record.every = self._kept.rows(), self._kept.every
        self._record.trajectory_steps = self._kept.steps
        if self._recent_s is not None:
            self._record.spans = _recent(self._record.spans, self._recent_s)
            del self._record.syncs[:-1]
        return self._record

    def _begin_again(self, start: StartRow) -> None:
        """Forget the steps that an attempt repeats, and the calls of processes that have ended."""
        self._record.starts.append(start)
        self._record.end = None
        self._record.calls.clear()
        self._record.steps = [row for row in self._record.steps if row.step <= start.after]
        self._kept.begin_again(start)


def _recent(spans: list[SpanRow], recent_s: float) -> list[SpanRow]:
    last = {span.worker: span for span in spans}
    begin = max((span.at for span in spans), default=0.0) - recent_s
    return [span for span in spans if span.at >= begin or span is last[span.worker]]


def _add(record: Record, row: RecordRow) -> None:
    match row:
        case PhaseRow():
            record.phases.append(row)
        case StepRow():
            record.steps.append(row)
        case AlarmRow():
            record.alarms.append(row)
        case CallRow():
            if row.stage == BUILD:  # a new process of this name
                record.calls = [call for call in record.calls if call.worker != row.worker]
            record.calls.append(row)
        case SpanRow():
            answered = (row.worker, row.stage, row.began)
            record.calls = [call for call in record.calls if (call.worker, call.stage, call.at) != answered]
            record.spans.append(row)
        case SyncRow():
            record.syncs.append(row)
        case EndRow():
            record.end = row
        case RuleRow():
            record.rule = row.text
        case TokensRow():
            record.tokens |= row.texts
        case _:
            raise AssertionError(f"{type(row).__name__} is added by RecordReader")
