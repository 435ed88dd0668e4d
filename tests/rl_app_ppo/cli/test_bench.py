"""`rl bench`: the speed of a short run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_app_ppo.cli.bench import speed_of, speed_text


def metrics(step: int, seconds: float, tokens: float, gen: float) -> dict[str, float]:
    whole = {"timing_s/step": seconds, "perf/throughput": tokens, "timing_s/gen": gen, "timing_s/testing": 9.0}
    return {"step": float(step), **whole, "startup_s/first_step": 7.25}


def test_the_first_step_and_the_validation_before_it_are_not_measured() -> None:
    history = [
        {"step": 0.0},
        metrics(1, 9.0, 10.0, 8.0),
        metrics(2, 2.0, 1000.0, 1.0),
        {**metrics(3, 1.0, 3000.0, 0.25), "timing_s/update_actor": 0.6},
        {**metrics(4, 4.0, 2000.0, 1.0), "timing_s/update_actor": 2.0},
    ]
    speed = speed_of(history)
    assert (speed.steps, speed.step_s, speed.tokens_per_s, speed.first_step_s) == (3, 2.0, 2000.0, 7.25)
    assert list(speed.stages.items()) == [("update_actor", 0.5), ("gen", 0.25)]
    assert [line.split() for line in speed_text(speed).splitlines()] == [
        ["first", "step", "done", "after", "7.2", "s"],
        ["median", "of", "3", "steps", "2.00", "s"],
        ["tokens", "per", "second", "2,000"],
        ["update_actor", "50%"],
        ["gen", "25%"],
    ]


@pytest.mark.slow
def test_a_run_is_measured_and_leaves_nothing(tmp_path: Path, base_model: Path) -> None:
    small = [
        f"model.path={base_model}",
        "data.train_batch_size=8",
        "actor.ppo_mini_batch_size=8",
        "data.val_size=8",
    ]
    (tmp_path / "tmp").mkdir()
    rl = Path(sys.executable).with_name("rl")
    done = subprocess.run(
        [rl, "bench", "--json", "--steps", "2", *small],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
    )
    assert done.returncode == 0, done.stderr
    speed = json.loads(done.stdout)
    assert speed["steps"] == 2
    assert speed["tokens_per_s"] > 0
    assert {"gen", "update_actor"} <= speed["stages"].keys()
    assert "step 1/3" in done.stderr
    assert "/checkpoint" not in done.stderr
    assert "validation accuracy" not in done.stderr
    # torch makes its cache there
    assert [path.name for path in (tmp_path / "tmp").iterdir() if not path.name.startswith("torchinductor_")] == []
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]
