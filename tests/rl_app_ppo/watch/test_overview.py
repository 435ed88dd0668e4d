"""What `rl watch` says of a run, from rows with known times."""

from __future__ import annotations

import pytest

from rl_app_ppo.watch.followed_run import Seen
from rl_app_ppo.watch.overview import WorkerNow, covered, overview, seconds_left
from rl_trainer.record.read_record import Record
from rl_trainer.record.record_rows import AlarmRow, CallRow, EndRow, PhaseRow, SpanRow, StartRow, StepRow


@pytest.fixture
def seen():
    """Step 3 of 10 is over at 130; the actor updates, the reward worker waits."""
    record = Record(
        starts=[StartRow(at=100.0, steps=10)],
        phases=[PhaseRow(at=101.0, name="ray", began=100.0)],
        steps=[StepRow(at=100.0 + 10 * step, step=step) for step in range(4)],
        calls=[CallRow(at=131.0, worker="actor", stage="update_actor")],
        spans=[
            SpanRow(at=120.0, worker="actor", stage="rollout", began=90.0),
            SpanRow(at=129.0, worker="reward", stage="reward", began=128.0),
        ],
        alarms=[AlarmRow(at=1.0, name="gap", text="a\x1b[2J\nb")],
    )
    lines = [{"step": step, "critic/score/mean": step / 10} for step in range(1, 4)]
    lines[-1] |= {
        "perf/throughput": 1234.5,
        "timing_s/step": 4.0,
        "timing_s/gen": 3.0,
        "timing_s/reward": 0.5,
        "timing_s/adv": 0.001,
        "training/off_policy/trajectory_staleness_worst/max": 2.0,
        "replay/failed_sessions": 7.0,
        "replay/retried_prompts": 0.0,
    }
    return Seen(name="run", record=record, metrics=[{"step": 0, "val-core/s/acc/mean@1": 0.25}, *lines])


def test_the_state_is_the_step_with_the_time_left(seen):
    """A step takes 10 s, and 7 are left."""
    assert seconds_left(seen) == 70.0
    shown = overview(seen, 135.0)
    assert shown.state == "step 3 of 10, 0:05 since its end, 1:10 left"
    assert shown.numbers == "1,234 tokens/s   staleness at most 2   failed sessions 7"
    assert shown.stages == "gen 75%   reward 12%"
    assert dict(shown.curves) == {
        "mean score": [(1, 0.1), (2, 0.2), (3, 0.3)],
        "validation accuracy": [(0, 0.25)],
    }
    assert shown.alarms == ["warning: a\ufffd[2J b"]


def test_a_clock_that_was_set_back_shows_no_negative_time(seen):
    assert overview(seen, 1.0).state == "step 3 of 10, 0:00 since its end, 1:10 left"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_curve_leaves_out_numbers_that_are_not_finite(seen, value):
    for line in (seen.metrics[0], seen.metrics[2], seen.metrics[3]):
        line |= {name: value for name in ("critic/score/mean", "val-core/s/acc/mean@1") if name in line}
    assert dict(overview(seen, 135.0).curves) == {"mean score": [(1, 0.1)], "validation accuracy": []}


def test_workers_say_what_they_do_and_how_busy_they_were(seen):
    """In the last 60 s, 75..135, the actor computed in 90..120 and in 131..135."""
    assert overview(seen, 135.0).workers == [
        WorkerNow("actor", "update_actor for 0:04", 34 / 60),
        WorkerNow("reward", "waits for 0:06 after reward", 1 / 60),
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"end": EndRow(at=131.0, outcome="failed", text="no\x07 luck")}, "failed no\ufffd luck"),
        ({"steps": []}, "starting after ray"),
        ({"steps": [], "phases": [], "starts": []}, "starting"),
    ],
)
def test_a_run_that_starts_or_is_over_says_so(seen, change, expected):
    for name, value in change.items():
        setattr(seen.record, name, value)
    shown = overview(seen, 135.0)
    assert shown.state == expected
    assert (shown.workers == []) == ("end" in change)


def test_intervals_that_overlap_count_once():
    assert covered([(0.0, 5.0), (3.0, 8.0), (3.0, 4.0), (20.0, 30.0)], 1.0, 25.0) == 12.0
    assert covered([], 0.0, 1.0) == 0.0
