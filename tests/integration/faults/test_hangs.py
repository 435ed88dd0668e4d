"""A run in which nothing moves ends with a report of who waits for what, and leaves nothing."""

from __future__ import annotations

import os
import re
import signal

import pytest
from app_runs import processes_of, started

SMALL = (
    "trainer.total_training_steps=100000",
    "data.val_size=16",
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=8",
    "rollout.num_workers=1",
    "actor.use_kl_loss=false",
    "trainer.hang_report_s=5",
)


def ended_by_the_watchdog(run, folder):
    """The report on the console, after the checks that hold for every hang."""
    try:
        out, err = run.communicate(timeout=240)
    finally:
        run.kill()
    assert run.returncode == 1, (out, err)
    assert err.startswith("the run failed: Nothing has moved for 5 s (trainer.hang_report_s)")
    assert "Traceback" not in err + out
    report = (folder / "logs" / "hang.txt").read_text()
    assert report.strip() in out.replace("\r", "")
    assert str(folder / "logs" / "hang.txt") in err
    assert "0 CPUs are requested from Ray (ray.cpus_per_worker); " in report
    assert "=== tasks of the driver" in report
    return report


@pytest.mark.slow
def test_a_stopped_rollout_worker_ends_the_run_with_its_prompts_and_all_stacks(tmp_path, base_model, mark):
    folder = tmp_path / "run"
    overrides = ("placement=separate", "async_rl.max_staleness=1", "algorithm.old_log_prob=recompute")
    long = (
        "rollout.temperature=5",  # hardly ever the end of the sequence
        "rollout.response_length=48",
        "rollout.max_batch_size=2",  # responses take far longer than the update of the weights
        "trainer.val_before_train=false",
    )
    run = started(mark, folder, f"model.path={base_model}", *SMALL, *overrides, *long, lines=3)
    (pid,) = processes_of(folder, "rollout-0")
    os.kill(pid, signal.SIGSTOP)
    report = ended_by_the_watchdog(run, folder)
    assert re.search(r"rollout-0 has not answered 'rollout' for \d+ s: step (\d+), prompts s\1-0, s\1-1, ", report)
    assert re.search(r"prompts in 'train': .*Not settled: s\d+-0: sessions 0, 1, ", report)
    assert f"rollout-0 (process {pid}) is stopped (SIGSTOP" in report
    assert "in Rollouts.roll_out" in report
    named = re.findall(r"^=== process (\S+)$", report, re.MULTILINE)
    assert {"actor", "reward", "controller"} <= set(named)
    assert "rollout-0" not in named


@pytest.mark.slow
def test_a_reward_function_that_never_returns_is_named_with_its_line(tmp_path, base_model, mark, monkeypatch):
    folder, reward = tmp_path / "run", tmp_path / "patient.py"
    reward.write_text(
        "import pathlib, time\n"
        "def patient(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    if pathlib.Path({str(tmp_path / 'hang')!r}).exists():\n"
        "        time.sleep(600)\n"
        "    return 0.0\n"
    )
    overrides = ("--trust", str(reward), f"reward.function={reward}:patient", "reward.timeout_s=600")
    run = started(mark, folder, f"model.path={base_model}", *SMALL, *overrides, lines=2)
    (tmp_path / "hang").touch()
    report = ended_by_the_watchdog(run, folder)
    assert re.search(r"reward has not answered '(reward|evaluate)' for \d+ s: step \d+, \d+ rows of prompts ", report)
    assert f'File "{reward}", line 4 in patient' in report


@pytest.mark.nightly
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_stopped_worker_behind_a_stage_that_takes_too_long_is_named_once(tmp_path, base_model, mark, ahead):
    folder = tmp_path / "run"
    overrides = ("placement=separate", f"async_rl.max_staleness={ahead}", "algorithm.old_log_prob=recompute")
    limits = ("trainer.stage_timeout_s=8", "checkpoint_engine.timeout_s=8", "trainer.hang_report_s=0")
    once = ("restart.heartbeat_s=0", "restart.max_per_hour=0")
    run = started(mark, folder, f"model.path={base_model}", *SMALL, *overrides, *limits, *once, lines=2)
    (pid,) = processes_of(folder, "rollout-0")
    os.kill(pid, signal.SIGSTOP)
    try:
        out, err = run.communicate(timeout=240)
    finally:
        run.kill()
    assert run.returncode == 1, (out, err)
    named = rf"^the run failed: Worker rollout-0 \(process {pid}\) is stopped \(SIGSTOP.* Because of that: "
    assert re.search(named, err), err
    assert err.count(f"(process {pid})") == 1
    assert "restart.max_per_hour=0" in err
