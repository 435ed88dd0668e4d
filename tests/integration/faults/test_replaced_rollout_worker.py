"""A rollout worker killed during a run is replaced, and the new one gets the current weights."""

from __future__ import annotations

import json
import os
import signal

import pytest
from app_runs import processes_of, started

STEPS = 24  # so that the run is not over before the worker is killed


@pytest.mark.slow
def test_a_killed_rollout_worker_is_replaced_and_the_run_continues(tmp_path, base_model, mark):
    folder = tmp_path / "run"
    run = started(
        mark,
        folder,
        f"model.path={base_model}",
        f"trainer.total_training_steps={STEPS}",
        "data.val_size=16",
        "data.train_batch_size=8",
        "actor.ppo_mini_batch_size=8",
        "rollout.num_workers=2",
        "actor.use_kl_loss=false",
        "actor.optim.lr=1e-3",
        lines=3,
    )
    try:
        os.kill(processes_of(folder, "rollout-1")[0], signal.SIGKILL)
        out, err = run.communicate(timeout=300)
    finally:
        run.kill()
    assert run.returncode == 0, (out, err)
    assert len(set(processes_of(folder, "rollout-1"))) == 2
    log = (folder / "logs" / "driver.log").read_text()
    assert "Receiver rollout-1 is quarantined: " in log
    assert "Worker rollout-1 died during" in log
    # what follows names the call that found it, which depends on the moment
    said = "rollout worker rollout-1 is lost and gets a new process (restart 1 of at most 6 an hour, in 1 s): "
    assert said in log
    assert said in out

    _, *trained = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [m["training/global_step"] for m in trained] == list(range(1, STEPS + 1))
    assert [m["weight_sync/version"] for m in trained] == list(range(1, STEPS + 1))
    assert (trained[-1]["weight_sync/receivers"], trained[-1]["weight_sync/rejoined"]) == (2, 1)
    # Repeated responses come from the current weights; the base model's log-probs would differ by
    # far more.
    assert [m["training/off_policy/trajectory_staleness_worst/max"] for m in trained] == [0] * STEPS
    assert max(m["training/rollout_log_probs_diff_max"] for m in trained) < 1e-4
