"""The lines on the terminal: steps, and the files of the run."""

from __future__ import annotations

import io
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from rl_app_ppo.outputs.console import LossNotes, OldLogProbNotes, Screen, stage_shares, step_line, validation_accuracy
from rl_app_ppo.outputs.run_folder import RunFiles
from rl_protocol.ports import GroupFailure


def test_the_column_kl_is_the_divergence_from_the_reference_or_is_not_there():
    assert "  kl 0.2500  " in step_line(1, 2, {"actor/ref_kl": 0.25, "actor/ppo_kl": 7.0})
    assert "  kl 0.2500  " in step_line(1, 2, {"actor/reward_kl_penalty": 0.25, "actor/ppo_kl": 7.0})
    assert "  kl 0.0000  " in step_line(1, 2, {"actor/ref_kl": -1e-9})
    assert "kl" not in step_line(1, 2, {"actor/ppo_kl": 7.0})


def test_only_what_is_there_is_listed(tmp_path):
    files = RunFiles(folder=tmp_path)
    assert files.written() == {}
    files.metrics.write_text("")
    files.checkpoint.mkdir()
    assert files.written() == {"metrics": files.metrics, "checkpoint": files.checkpoint}


def test_the_banner_has_the_whole_path_of_the_run_on_a_narrow_terminal():
    out, folder = io.StringIO(), Path("/data") / ("long" * 20)
    Screen(Console(file=out, width=60)).header({"model": "demo"}, folder)
    lines = [line.strip("│").split() for line in out.getvalue().splitlines()]
    assert str(folder) in "".join(line[-1] for line in lines[2:-1])


@pytest.mark.parametrize(
    ("values", "scale"), [((0.5, 0.75), "0.00 1.00"), ((3.0, 5.0), "0.00 5.00"), ((-4.0, -2.0), "-4.00 1.00")]
)
def test_the_curve_shows_values_beyond_0_and_1(values, scale):
    out = io.StringIO()
    Screen(Console(file=out, width=80)).curve({"reward": [*enumerate(values)], "accuracy": [(0, 0.25), (1, 0.5)]})
    least, most = scale.split()
    rows = [line.split("┤")[0].strip() for line in out.getvalue().splitlines() if "┤" in line]
    assert (rows[-1], rows[0]) == (least, most)
    assert "reward" in out.getvalue()


def test_the_axis_of_one_step_has_no_fractions_of_steps():
    out = io.StringIO()
    Screen(Console(file=out, width=80)).curve({"accuracy": [(1, 0.5)]})
    axis = out.getvalue().split("┬")[-1]
    assert axis.split()[-2:] == ["1", "step"]
    assert "1.5" not in axis


def test_the_step_line_keeps_its_columns():
    metrics = {
        "critic/score/mean": 0.5,
        "critic/acc/mean": 0.5,
        "response_length/mean": 4.0,
        "actor/ref_kl": 0.01,
        "timing_s/step": 0.6,
    }
    line = step_line(3, 30, metrics)
    assert line.startswith("step  3/30  reward  0.500  acc 0.500  len   4.0  kl 0.0100   0.60 s")
    assert "val 0.750" in step_line(3, 30, {**metrics, "val-core/x/acc/mean@1": 0.75})
    assert "lag 2" in step_line(3, 30, {**metrics, "training/off_policy/trajectory_staleness_worst/max": 2.0})
    assert validation_accuracy({"val-core/x/acc/mean@1": 0.5, "val-core/y/acc/mean@1": 1.0}) == 0.75
    assert validation_accuracy(metrics) is None


def test_the_step_line_has_tokens_per_second_and_the_two_longest_stages():
    stages = {"timing_s/gen": 0.6, "timing_s/adv": 0.04, "timing_s/update_actor": 1.0, "timing_s/ref": 0.2}
    metrics = {"timing_s/step": 2.0, "timing_s/testing": 9.0, "perf/throughput": 1234.5, **stages}
    assert stage_shares(metrics) == [("update_actor", 0.5), ("gen", 0.3), ("ref", 0.1), ("adv", 0.02)]
    assert step_line(1, 2, metrics).endswith("  2.00 s  1234 tok/s  update 50% gen 30%")
    assert stage_shares({"timing_s/gen": 0.6}) == []
    del metrics["timing_s/gen"], metrics["timing_s/ref"]
    assert step_line(1, 2, metrics).endswith("update 50%"), "2 % are not worth a column"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "left 0:00"), (65, "left 1:05"), (3599.6, "left 1:00:00"), (90_000, "left 25:00:00")]
)
def test_the_step_line_says_how_long_the_rest_takes(seconds, shown):
    assert step_line(1, 2, {}, seconds).endswith(shown)


def test_the_longest_step_line_has_a_hundred_columns_and_keeps_what_matters_most():
    metrics = {
        "critic/score/mean": -12.345,
        "critic/acc/mean": 0.5,
        "response_length/mean": 12345.6,
        "actor/ref_kl": 123.4567,
        "actor/entropy": 12.345,
        "timing_s/step": 1234.56,
        "timing_s/update_actor": 1000.0,
        "val-core/x/acc/mean@1": 0.75,
        "training/off_policy/trajectory_staleness_worst/max": 12.0,
    }
    line = step_line(99_999, 100_000, metrics, 123_456)
    assert len(line) <= 100
    assert line == "step  99999/100000  reward -12.345  acc 0.500  1234.56 s  left 34:17:36  lag 12  val 0.750"


def test_the_step_line_has_no_entropy_that_was_not_computed():
    assert "  ent 0.250  " in step_line(1, 2, {"actor/entropy": 0.25})
    assert "ent" not in step_line(1, 2, {})


def test_a_changed_choice_of_old_log_probs_is_said_once():
    said = []
    notes = OldLogProbNotes(said.append, 1e-3)
    gap, lag = "training/rollout_log_probs_diff_mean", "training/off_policy/trajectory_staleness_worst/max"
    for step, (difference, steps_old) in enumerate([(2e-7, 0), (1e-3, 0), (0.02, 0), (0.03, 0), (0.5, 1), (0.0, 0)]):
        notes.on_step_end(step, {gap: difference, lag: float(steps_old)})
    notes.on_step_end(6, {})
    assert said == [
        "step 0: log-probs of rollout engine and actor agree (mean difference 2e-07 nats): old log-probs are the engine's",
        "step 2: log-probs of rollout engine and actor differ by 0.02 nats on average, more than "
        "algorithm.old_log_prob_tolerance=0.001: old log-probs are recomputed",
        "step 4: rows are from older weights (training/off_policy/trajectory_staleness_worst/max 1): old log-probs are recomputed",
        "step 5: log-probs of rollout engine and actor agree (mean difference 0 nats): old log-probs are the engine's",
    ]


def test_failed_rollouts_are_said_with_what_became_of_their_prompts():
    screen = Mock()
    failures = [
        GroupFailure(uid="s3-1", attempt=0, sessions=2, reason="session 4: the tool is gone", outcome="retried"),
        GroupFailure(uid="s3-1", attempt=1, sessions=1, reason="session 9: no answer", outcome="failed"),
    ]
    LossNotes(screen).on_rollout_failure(3, failures, 1)
    screen.note.assert_called_once_with(
        "step 3: 3 rollouts failed, prompts: 1 rolled out again, 1 replaced by another prompt. The last, s3-1: session 9: no answer"
    )
