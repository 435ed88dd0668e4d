"""Reward functions that raise, hang, return NaN or are always 0: the console says so while the run
goes on, with file and line, and the run ends as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from app_runs import Finished

pytestmark = pytest.mark.slow

FAILS = """\
import time

def score(data_source, solution_str, ground_truth, extra_info=None):
    kind = sum(map(ord, solution_str)) % 4
    if kind == 0:
        raise ValueError("not today")
    if kind == 1:
        return float("nan")
    if kind == 2:
        time.sleep(600)
    return 0.5
"""
Run = Callable[..., tuple[Path, Finished]]
ZERO = """\
def score(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0
"""


@pytest.fixture
def scored_by(app: Callable[..., Finished], tmp_path: Path) -> Run:
    """Text of a file, overrides -> (file, a run whose rewards are its function `score`)."""

    def run(text: str, *overrides: str) -> tuple[Path, Finished]:
        file = tmp_path / "near.py"
        file.write_text(text)
        return file, app("--trust", str(file), f"reward.function={file}:score", "trainer.save_freq=0", *overrides)

    return run


def test_a_function_that_fails_in_several_ways_is_an_alarm_with_each_kind_and_its_line(scored_by: Run) -> None:
    file, done = scored_by(FAILS, "reward.timeout_s=1", "trainer.val_before_train=false", "trainer.test_freq=0")
    assert done.code == 0, (done.out, done.err)
    (alarm,) = [line for line in done.out.splitlines() if line.startswith("warning: step 1: reward.function failed")]
    assert f"raised ValueError: not today ({file}:6)" in alarm
    assert f"did not return within 1 s (reward.timeout_s) ({file}:3)" in alarm
    assert f"returned nan; it must return a finite number ({file}:3)" in alarm
    assert str(done.folder / "logs" / "reward.log") in alarm


def test_a_function_that_is_always_0_is_an_alarm_with_its_line(scored_by: Run) -> None:
    file, done = scored_by(ZERO, "trainer.val_before_train=false", "trainer.test_freq=0")
    assert done.code == 0, (done.out, done.err)
    (alarm,) = [line for line in done.out.splitlines() if "every response has the reward 0" in line]
    assert alarm.startswith("warning: step 1: ")
    assert f"reward.function={file}:score ({file}:1)" in alarm
