"""A run goes on after the death of any process, and after one that hangs."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from app_runs import marked, name_of, processes_of, started
from polling import until

STEPS, SAVE_FREQ = 48, 4


def lines(folder: Path) -> int:
    return (folder / "metrics.jsonl").read_text().count("\n")


@pytest.mark.slow
def test_a_killed_actor_and_a_stopped_rollout_worker_cost_no_step(tmp_path, base_model, mark):
    """The run starts again from its checkpoint with a new actor; the rollout worker is replaced."""
    folder = tmp_path / "run"
    run = started(
        mark,
        folder,
        f"model.path={base_model}",
        *(f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={SAVE_FREQ}", "trainer.test_freq=0"),
        *("data.val_size=16", "data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "actor.use_kl_loss=false"),
        *("rollout.num_workers=1", "placement=separate", "restart.heartbeat_s=5", "restart.backoff_s=0.1"),
        lines=SAVE_FREQ + 3,
    )
    try:
        os.kill(processes_of(folder, "actor")[0], signal.SIGTERM)
        until(lambda: len(processes_of(folder, "actor")) == 2, "a second actor", 200.0)
        before = lines(folder)
        until(lambda: lines(folder) > before, "a step after the restart", 200.0)
        stopped = processes_of(folder, "rollout-0")[-1]
        os.kill(stopped, signal.SIGSTOP)
        out, err = run.communicate(timeout=300)
    finally:
        run.kill()
    assert run.returncode == 0, (out, err)
    again = r"a process of the run has died, so the run starts again \(restart 1 of at most 6 an hour, in 0\.1 s\): "
    died = again + r"Worker actor (?:died|\(process \d+\) is gone) during "  # the second one if it sent weights
    assert len(re.findall(died, out)) == 1, out
    resumed = re.findall(r"resumes after step (\d+) ", out)
    assert [int(step) % SAVE_FREQ for step in resumed] == [0], out
    assert f"Worker rollout-0 (process {stopped}) has not moved for 5 s (restart.heartbeat_s), so it is killed" in out
    assert re.search(
        r"rollout worker rollout-0 is lost and gets a new process \(restart 1 of at most 6 an hour, in 0\.1 s\): .*Worker rollout-0 died "
        r"during \S+: its process hung for 5 s \(restart\.heartbeat_s\) and was therefore killed\. Its log: ",
        out,
    ), out
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in metrics if one["step"]] == list(range(1, STEPS + 1))
    assert (folder / "checkpoint" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_run_whose_gcs_server_dies_starts_again_before_ray_ends_the_driver(tmp_path, base_model, mark):
    folder = tmp_path / "run"
    run = started(
        mark,
        folder,
        f"model.path={base_model}",
        *("trainer.total_training_steps=100000", "trainer.save_freq=1", "trainer.test_freq=0"),
        *("data.val_size=16", "data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "actor.use_kl_loss=false"),
        *("rollout.num_workers=1", "placement=separate", "restart.backoff_s=0.1"),
        lines=3,
    )
    try:
        (gcs,) = [process for process in marked(mark) if name_of(process) == "gcs_server"]
        gcs.kill()
        until(lambda: len(processes_of(folder, "actor")) == 2, "a second actor", 200.0)
        before = lines(folder)
        until(lambda: lines(folder) > before, "a step after the restart", 200.0)
        os.killpg(run.pid, signal.SIGINT)
        out, err = run.communicate(timeout=300)
    finally:
        run.kill()
    assert run.returncode == 130, (out, err)
    assert f"in 0.1 s): The GCS server of Ray (process {gcs.pid}) was killed by SIGKILL" in out
    assert "resumes after step " in out
