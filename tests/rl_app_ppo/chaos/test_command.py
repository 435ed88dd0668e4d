"""Runs of `rl chaos`, with real processes."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from rl_app_ppo.chaos.command import chaos
from rl_app_ppo.chaos.report import ChaosReport
from rl_protocol import OutputError

pytestmark = pytest.mark.slow


@pytest.mark.timeout(600)
def test_runs_whose_processes_are_killed_lose_nothing(tmp_path):
    out, path = io.StringIO(), tmp_path / "chaos.json"
    good = chaos(3, 1, 0, path, Console(file=out, width=200))
    assert good, out.getvalue()
    report = msgspec.json.decode(path.read_bytes(), type=ChaosReport)
    assert [one.schedule.number for one in report.outcomes] == [0, 1, 2]
    assert [one.trained for one in report.outcomes] == [48] * 3
    assert sum(one.starts for one in report.outcomes) > 3
    assert report.summary.runs == 3
    assert "0 lost, 0 doubled, 0 held, 0 went back, 0 hung, 0 left behind" in out.getvalue()


def test_a_report_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(OutputError, match="--json"):
        chaos(1, 1, 2, tmp_path / "none" / "chaos.json", Console(file=io.StringIO()))
