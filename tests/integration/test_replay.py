"""`rl replay` computes a step of a real run again, and finds what differs."""

from __future__ import annotations

import json
import subprocess

import pytest
from app_runs import ROOT


def replay(*words: str) -> subprocess.CompletedProcess[str]:
    command = ["uv", "run", "--no-sync", "--project", str(ROOT), "rl", "replay", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
def test_a_step_is_equal_until_a_metric_of_the_run_is_changed(app):
    run = app(
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
        "trainer.test_freq=0",
        "trainer.deterministic=true",
        "trainer.threads_per_worker=1",
        "trainer.samples_per_step=64",
        "actor.optim.lr=1e-3",
    )
    assert run.code == 0, run.err
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    done = replay(str(run.folder), "--step", "4", "--row", "s4-3/1/0", "--field", "advantages")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 4 was computed again from checkpoint step-000002" in done.stdout
    assert "parameters and optimizer: equal" in done.stdout
    last = json.loads(done.stdout.splitlines()[-1])
    assert len(last) >= 1
    assert {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()} == before

    metrics = run.folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[3]["actor/pg_loss"] += 1e-9
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = replay(str(run.folder), "--step", "3")
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "actor/pg_loss" in line]
    assert line.split()[:3] == ["3", "actor/pg_loss", repr(lines[3]["actor/pg_loss"])]
    assert "parameters: not compared, for the run has no checkpoint of step 3" in done.stdout
