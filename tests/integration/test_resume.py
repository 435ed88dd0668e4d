"""A run that is killed goes on from its newest whole checkpoint, and ends with the weights and metrics it would have had."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from .conftest import MARK, command, marked

STEPS = 6


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_ends_as_one_that_was_not(tmp_path, base_model, mark):
    def arguments(name: str, *more: str) -> list[str]:
        return command(
            f"model.path={base_model}",
            f"trainer.output_dir={tmp_path}",
            f"trainer.run_name={name}",
            f"trainer.total_training_steps={STEPS}",
            "trainer.test_freq=2",
            "data.val_size=16",
            "data.train_batch_size=8",
            "actor.ppo_mini_batch_size=8",
            "rollout.num_workers=1",
            "actor.use_kl_loss=false",
            "actor.optim.lr=1e-3",
            *more,
        )

    environment = {**os.environ, MARK: mark}
    straight = subprocess.run(arguments("straight"), capture_output=True, text=True, timeout=120, env=environment)
    assert straight.returncode == 0, straight.stderr
    resumable = arguments("killed", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=2", "trainer.resume_mode=auto")
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(resumable, stdout=log, stderr=log, env=environment)
    folder = tmp_path / "killed"
    deadline = time.monotonic() + 120
    while not (folder / "checkpoints" / "step-000002").exists():
        assert process.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for victim in marked(mark):
        victim.kill()
    process.wait(timeout=30)
    done = subprocess.run(resumable, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert "resumes after step " in done.stdout
    weights = [load_file(tmp_path / name / "checkpoint" / "model.safetensors") for name in ("straight", "killed")]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][name].tobytes() == weights[1][name].tobytes() for name in weights[0])
    assert steps_of(folder) == steps_of(tmp_path / "straight") == list(range(STEPS + 1))
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept[-2:] == ["step-000005", "step-000006"]
    assert len(kept) <= 3  # the best one may be an earlier one


def steps_of(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
