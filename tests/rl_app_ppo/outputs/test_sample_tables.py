"""Tables of a step's trajectories, once it is recorded as a whole."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import msgspec
import pytest

from rl_app_ppo.outputs.metric_sinks import BackgroundSink
from rl_app_ppo.outputs.sample_tables import COLUMNS, SampleTable, SampleTables
from rl_protocol.testing.bigram_model import ListSink
from rl_trainer.record.record_file import RecordFile
from rl_trainer.record.record_rows import StepRow, TrajectoryRow


def trajectory(step: int, key: str = "p-0/0/0", *, at: float | None = None, why: str = "best") -> TrajectoryRow:
    failed = why == "failed"
    return TrajectoryRow(
        at=time.time() if at is None else at,
        step=step,
        key=key,
        why=why,
        data_source="sums",
        ground_truth="82",
        prompt="37+45=",
        response="82<eos>",
        prompt_ids=[1, 2],
        response_ids=[3, 4, 5],
        response_mask=[1, 0, 1],
        rollout_log_probs=[0.0, 0.0, 0.0],
        versions=[(0, 3)],
        advantages=[] if failed else [1.0, 9.0, 2.0],
        turns=2,
        reward={} if failed else {"score": 0.75, "exact_match/score": 1.0},
        texts={} if failed else {"pred": "82"},
        failure="it raised" if failed else "",
    )


def write(folder: Path, *rows: TrajectoryRow, name: str = "reward") -> None:
    file = RecordFile(folder, name)
    file.append([StepRow(at=time.time(), step=0), *rows])
    file.close()


def steps(tables: list[SampleTable]) -> list[int]:
    return [table.step for table in tables]


def test_a_row_has_a_cell_for_each_column(tmp_path: Path):
    tables = SampleTables(tmp_path)
    write(tmp_path, trajectory(3), trajectory(3, "p-1/0/0", why="failed"))
    ((best, failed),) = (table.rows for table in tables.new(done=True))
    parts = json.dumps({"exact_match/score": 1.0, "pred": "82"})
    assert dict(zip(COLUMNS, best, strict=True)) == {
        "step": 3,
        "key": "p-0/0/0",
        "why": "best",
        "prompt": "37+45=",
        "response": "82<eos>",
        "ground_truth": "82",
        "reward": 0.75,
        "parts": parts,
        "advantage": 1.5,
        "tokens": 3,
        "turns": 2,
        "failure": "",
    }
    assert dict(zip(COLUMNS, failed, strict=True))["failure"] == "it raised"
    assert [failed[COLUMNS.index(name)] for name in ("reward", "advantage")] == [None, None]


def test_a_step_is_returned_once_when_a_later_one_is_recorded(tmp_path: Path):
    tables = SampleTables(tmp_path)
    assert tables.new() == []
    write(tmp_path, trajectory(1))
    assert tables.new() == []
    write(tmp_path, trajectory(1, "p-1/0/0"), trajectory(2))
    (first,) = tables.new()
    assert (first.step, len(first.rows)) == (1, 2)
    assert tables.new() == []
    assert steps(tables.new(done=True)) == [2]
    assert tables.new(done=True) == []


def test_a_failure_of_the_next_step_does_not_complete_a_step(tmp_path: Path):
    """An asynchronous run scores the next batch before it chooses trajectories of this one."""
    tables = SampleTables(tmp_path)
    write(tmp_path, trajectory(1, why="failed"), trajectory(2, why="failed"))
    assert tables.new() == []
    write(tmp_path, trajectory(1), trajectory(2))
    (first,) = tables.new()
    assert (first.step, len(first.rows)) == (1, 2)


def test_rows_of_an_earlier_attempt_are_left_out(tmp_path: Path):
    write(tmp_path, trajectory(1), trajectory(2))
    tables = SampleTables(tmp_path)
    write(tmp_path, trajectory(2))
    (table,) = tables.new(done=True)
    assert (table.step, len(table.rows)) == (2, 1)


class TableSink(ListSink):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def log_samples(self, table: SampleTable) -> None:
        self.steps.append(table.step)


def test_a_sink_that_takes_tables_gets_all_of_them_in_its_thread(tmp_path: Path):
    inner = TableSink()
    sink = BackgroundSink("tables", lambda: inner, close_s=60, tables=SampleTables(tmp_path))
    write(tmp_path, trajectory(1), trajectory(2))
    sink.log(1, {"a": 1.0})
    sink.close()
    assert inner.steps == [1, 2]
    assert inner.records == [(1, {"a": 1.0})]


def test_a_table_that_fails_is_said_once_and_loses_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    class Broken(TableSink):
        def log_samples(self, table: SampleTable) -> None:
            raise ConnectionError("no route")

    inner = Broken()
    sink = BackgroundSink("broken", lambda: inner, close_s=60, tables=SampleTables(tmp_path))
    write(tmp_path, trajectory(1), trajectory(2), trajectory(3))
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            sink.log(step, {})
        sink.close()
    assert (sink.lost, len(inner.records)) == (0, 3)
    assert [record.getMessage() for record in caplog.records] == [
        "The logger broken gets no more tables of samples: ConnectionError: no route. The report has them."
    ]


def test_an_advantage_that_is_not_finite_is_left_out_of_the_mean(tmp_path: Path):
    tables = SampleTables(tmp_path)
    write(tmp_path, msgspec.structs.replace(trajectory(3), advantages=[float("nan"), 9.0, 2.0]))
    ((row,),) = (table.rows for table in tables.new(done=True))
    assert dict(zip(COLUMNS, row, strict=True))["advantage"] == 2.0
