"""The report counts runs by cell, and a run fails by anything that is wrong."""

from __future__ import annotations

import os

import msgspec
import pytest

from rl_app_ppo.chaos.judge import Outcome
from rl_app_ppo.chaos.report import cells, read_report, summarize, write_report
from rl_app_ppo.chaos.schedule import Fault, Schedule, Strike, Victim
from rl_protocol import ConfigError


def outcome(*cells, struck=None, **wrong):
    strikes = tuple(
        Strike(victim=victim, fault=fault, which=0, event=number, after_s=0.0)
        for number, (victim, fault) in enumerate(cells)
    )
    good = Outcome(
        kind="plane",
        schedule=Schedule(seed=1, number=0, max_staleness=0, strikes=strikes),
        struck=tuple(range(len(strikes))) if struck is None else struck,
        starts=1,
        acknowledged=4,
        trained=8,
        lost=0,
        doubled=0,
        held=0,
        went_back=0,
        hung=False,
        left=(),
        failure="",
        seconds=1.0,
    )
    return msgspec.structs.replace(good, **wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"lost": 1}, {"doubled": 1}, {"held": 1}, {"went_back": 1}, {"hung": True}, {"left": ("x",)}, {"failure": "x"}],
)
def test_a_run_fails_by_anything_that_is_wrong(wrong):
    assert outcome().good
    assert not outcome(**wrong).good
    assert summarize(1, [outcome(), outcome(**wrong)]).summary.failed == 1


def test_only_strikes_that_hit_are_in_the_matrix():
    kill, stop = (Victim.DRIVER, Fault.KILL), (Victim.TRAINER, Fault.STOP)
    runs, failed = cells([outcome(kill), outcome(stop, kill, struck=(1,), lost=2), outcome(stop)])
    assert runs == {kill: 2, stop: 1}
    assert failed == {kill: 1}


def test_a_report_that_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ConfigError, match=r"--json .* must be a file"):
            read_report(path, 1)


def test_a_report_is_continued_only_with_its_seed(tmp_path):
    path = tmp_path / "chaos.json"
    assert read_report(path, 1) == []
    write_report(path, summarize(1, [outcome((Victim.DRIVER, Fault.KILL))]))
    assert read_report(path, 1) == [outcome((Victim.DRIVER, Fault.KILL))]
    with pytest.raises(ConfigError, match="seed 1, got --seed 2"):
        read_report(path, 2)
    path.write_text("{")
    with pytest.raises(ConfigError, match="no report"):
        read_report(path, 1)
