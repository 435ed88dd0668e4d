"""Runs with faults are collected over several result files: the newest counts, none is hidden."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from harness.chaos_runs import bars, failures, matrix, missing, newest, planned, runs_of, to_row
from harness.result_schema import Document, Row, check

from rl_app_ppo.chaos.judge import Kind, Outcome
from rl_app_ppo.chaos.schedule import APP_CELLS, Fault, Schedule, Strike, Victim

CELL = (Victim.DRIVER, Fault.KILL)


def outcome(
    number: int, cell: tuple[Victim, Fault] = CELL, *, kind: Kind = "app", mode: int = 0, lost: int = 0
) -> Outcome:
    victim, fault = cell
    strike = Strike(victim=victim, fault=fault, event=1)
    return Outcome(
        kind=kind,
        schedule=Schedule(seed=22, number=number, max_staleness=mode, strikes=(strike,)),
        struck=(0,),
        starts=2,
        acknowledged=4,
        trained=8,
        lost=lost,
        doubled=0,
        held=0,
        went_back=0,
        hung=False,
        left=(),
        failure="",
        seconds=1.5,
    )  # fmt: skip


def document(commit: str, *rows: Row) -> Document:
    info = {"cpu": "Some CPU", "cores": 2, "memory_gib": 24, "gpu": None}
    whole: dict[str, Any] = {
        "benchmark": "chaos_app",
        "command": ["uv"],
        "commit": commit,
        "hardware": info,
        "versions": {"python": "3.11"},
        "load_average": [0.1],
        "rows": [*rows],
    }
    return msgspec.convert(msgspec.to_builtins(whole), Document)


def at(second: int, one: Outcome) -> Row:
    return {**to_row(one), "ended": f"2026-01-02T00:00:0{second}.000+00:00"}


FAILED, OTHER = outcome(3, lost=2), outcome(4, (Victim.REWARD, Fault.STOP))
OLD = document("0123abcd", at(1, FAILED), at(2, OTHER))
NEW = document("4567abcd", at(3, outcome(3)))


def test_a_file_of_runs_is_a_whole_result():
    check(OLD)
    assert [run.outcome for run in runs_of([OLD])] == [FAILED, OTHER]


def test_a_failed_run_counts_until_it_is_repeated_and_stays_listed():
    assert newest(runs_of([OLD]))[0].outcome == FAILED
    repeated = runs_of([NEW, OLD])
    assert [(run.outcome.good, run.commit) for run in newest(repeated)] == [(True, "4567abcd"), (True, "0123abcd")]
    line = {"run": "app 22/3", "commit": "0123abcd", "faults": "kill -9 of driver", "what": "2 lost"}
    assert failures(runs_of([OLD])) == [{**line, "survived": "**not yet**"}]
    assert failures(repeated) == [{**line, "survived": "4567abcd"}]


def test_failed_runs_are_repeated_first_and_then_the_missing_ones_made():
    schedules = [outcome(number).schedule for number in (3, 5)] + [OTHER.schedule]
    assert planned(runs_of([OLD]), "app", schedules) == [FAILED.schedule, outcome(5).schedule]
    assert planned(runs_of([OLD, NEW]), "app", schedules) == [outcome(5).schedule]
    assert planned(runs_of([OLD, NEW]), "plane", schedules) == schedules


def test_of_the_missing_runs_those_of_cells_with_few_runs_come_first():
    made = [outcome(number) for number in range(3)]  # as many as a cell needs
    document_of_all = document("0123abcd", *(at(number, one) for number, one in enumerate(made, start=1)))
    others = [outcome(number).schedule for number in (10, 11)]
    scarce = [outcome(number, (Victim.REWARD, Fault.STOP)).schedule for number in range(12, 16)]
    found = planned(runs_of([document_of_all]), "app", [*others, *scarce])
    assert found == [*scarce[:3], *others, scarce[3]]


def test_the_matrix_counts_failures_and_lists_empty_cells():
    lines = matrix([FAILED, outcome(5), OTHER], "app").splitlines()
    driver = next(line for line in lines if line.startswith("| driver |"))
    assert driver.startswith("| driver | 2, **1 failed** | **missing** |")
    assert driver.endswith("| - | - |")
    reward = next(line for line in lines if line.startswith("| reward |"))
    assert reward.startswith("| reward | **missing** | **missing** | 1 |")
    empty = missing([FAILED, outcome(5), OTHER], "app")
    assert len(empty) == len(APP_CELLS) - 2
    assert "SIGTERM of driver" in empty
    assert "kill -9 of driver" not in empty


@pytest.mark.parametrize("modes", [(0, 0, 1), (0, 0, 0), (0, 1)])
def test_the_bars_look_at_the_emptiest_cell_of_each_mode(modes: tuple[int, ...]):
    some = [
        outcome(100 * place + number, cell, mode=mode)
        for place, mode in enumerate(modes)
        for number, cell in enumerate(APP_CELLS)
    ]
    rows = bars(runs_of([document("0123abcd", *(at(1, one) for one in [*some, outcome(999, kind="plane", lost=1)]))]))
    cells = len(APP_CELLS)
    assert [row["value"] for row in rows] == [
        1 + len(modes) * cells,
        len(modes) * cells,
        len(modes),
        modes.count(0),
        modes.count(1),
        1,
    ]
    assert [row["met"] for row in rows[2:]] == [
        "aim" if len(modes) >= 3 else "missed",
        "aim",
        "aim" if 1 in modes else "missed",
        "missed",
    ]
