"""Runs of `rl chaos`, with real processes."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from rl_app_ppo.chaos.command import chaos
from rl_app_ppo.chaos.report import ChaosReport
from rl_app_ppo.chaos.schedule import PLANE_CELLS, Fault, Victim
from rl_protocol import OutputError

SEED, RUNS = 22, 12


def report_of(path: Path) -> ChaosReport:
    return msgspec.json.decode(path.read_bytes(), type=ChaosReport)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_whose_processes_are_killed_lose_nothing(tmp_path):
    out, path = io.StringIO(), tmp_path / "chaos.json"
    good = chaos(RUNS, SEED, 0, path, Console(file=out, width=200), model=False, at_a_time=2)
    assert good, out.getvalue()
    outcomes = report_of(path).outcomes
    assert sorted(one.schedule.number for one in outcomes) == [*range(RUNS)]
    assert [one.trained for one in outcomes] == [48] * RUNS
    assert sum(one.starts for one in outcomes) > 4 * RUNS // 3  # most faults end a run
    assert {one.schedule.max_staleness for one in outcomes} == {0, 1}
    assert "0 lost, 0 doubled, 0 held, 0 went back, 0 hung, 0 left behind" in out.getvalue()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_application_survives_the_end_of_a_worker_and_changed_bytes_of_weights_and_memory(tmp_path):
    out, path = io.StringIO(), tmp_path / "chaos.json"
    assert chaos(3, 29, 0, path, Console(file=out, width=200), model=True), out.getvalue()
    outcomes = report_of(path).outcomes
    assert [one.kind for one in outcomes] == ["app"] * 3
    assert all(one.trained for one in outcomes)
    assert [(strike.victim, strike.fault) for one in outcomes for strike in one.strikes] == [
        (Victim.ROLLOUT, Fault.KILL),
        (Victim.STORAGE, Fault.FLIP_MEMORY),
        (Victim.TRAINER, Fault.FLIP_WEIGHTS),
    ]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_every_victim_fault_and_point_is_survived(tmp_path):
    out = io.StringIO()
    assert chaos(4 * len(PLANE_CELLS), 11, 0, None, Console(file=out, width=200), model=False, at_a_time=2), (
        out.getvalue()
    )


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_whole_application_survives(tmp_path):
    out, path = io.StringIO(), tmp_path / "chaos.json"
    assert chaos(6, 11, 0, path, Console(file=out, width=200), model=True), out.getvalue()
    report = msgspec.json.decode(path.read_bytes(), type=ChaosReport)
    assert [one.kind for one in report.outcomes] == ["app"] * 6
    assert all(one.trained for one in report.outcomes)


@pytest.mark.slow
def test_a_report_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(OutputError, match="--json"):
        chaos(1, 1, 2, tmp_path / "none" / "chaos.json", Console(file=io.StringIO()), model=False)
