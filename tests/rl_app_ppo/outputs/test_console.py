"""The lines on the terminal: steps, and the files of the run."""

from __future__ import annotations

from unittest.mock import Mock

from rl_app_ppo.outputs.console import LossNotes, OldLogProbNotes, step_line, validation_accuracy
from rl_app_ppo.outputs.run_folder import RunFiles
from rl_protocol.ports import GroupFailure


def test_the_column_kl_is_the_divergence_from_the_reference_or_is_not_there():
    assert "  kl  0.2500  " in step_line(1, 2, {"actor/ref_kl": 0.25, "actor/ppo_kl": 7.0})
    assert "  kl  0.2500  " in step_line(1, 2, {"actor/reward_kl_penalty": 0.25, "actor/ppo_kl": 7.0})
    assert "kl" not in step_line(1, 2, {"actor/ppo_kl": 7.0})


def test_only_what_is_there_is_listed(tmp_path):
    files = RunFiles(folder=tmp_path)
    assert files.written() == {}
    files.metrics.write_text("")
    files.checkpoint.mkdir()
    assert files.written() == {"metrics": files.metrics, "checkpoint": files.checkpoint}


def test_the_step_line_keeps_its_columns():
    metrics = {
        "critic/score/mean": 0.5,
        "critic/acc/mean": 0.5,
        "response_length/mean": 4.0,
        "actor/ref_kl": 0.01,
        "timing_s/step": 0.6,
    }
    line = step_line(3, 30, metrics)
    assert line.startswith("step  3/30  reward  0.500  accuracy 0.500  length  4.00  kl  0.0100")
    assert "validation 0.750" in step_line(3, 30, {**metrics, "val-core/x/acc/mean@1": 0.75})
    assert "lag 2" in step_line(3, 30, {**metrics, "training/off_policy/trajectory_staleness_worst/max": 2.0})
    assert validation_accuracy({"val-core/x/acc/mean@1": 0.5, "val-core/y/acc/mean@1": 1.0}) == 0.75
    assert validation_accuracy(metrics) is None


def test_the_step_line_has_no_entropy_that_was_not_computed():
    assert "  entropy 0.250  " in step_line(1, 2, {"actor/entropy": 0.25})
    assert "entropy" not in step_line(1, 2, {})


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
