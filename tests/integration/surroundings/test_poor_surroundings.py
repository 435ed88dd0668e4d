"""A run in surroundings that are not those of a developer's terminal."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from app_runs import MARK, PATIENT, command


@pytest.mark.slow
def test_a_run_without_reader_home_and_locale_on_a_linked_folder_trains_and_records_itself(tmp_path, base_model, mark):
    (tmp_path / "Größe mit Platz").mkdir()
    (tmp_path / "link").symlink_to("Größe mit Platz")
    settings = (
        f"model.path={base_model}",
        "trainer.output_dir=link/aus",
        "trainer.run_name=lauf",
        "trainer.total_training_steps=2",
        "data.val_size=16",
        "data.train_batch_size=8",
        "actor.ppo_mini_batch_size=8",
        "rollout.num_workers=1",
        PATIENT,
    )
    env = {**os.environ, MARK: mark, "LC_ALL": "C", "TERM": "dumb", "COLUMNS": "40", "HOME": "/proc/nowhere"}
    env["UV_CACHE_DIR"] = str(tmp_path / "uv")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as unread:
        done = subprocess.run(
            command(*settings), stdout=unread, stderr=subprocess.PIPE, text=True, timeout=500, cwd=tmp_path, env=env
        )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("standard output can't be written any more (Broken pipe)") == 1
    assert "Traceback" not in done.stderr
    run = tmp_path / "Größe mit Platz" / "aus" / "lauf"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == 2
    assert {"report.html", "checkpoint", "curve.png", "samples"} <= {path.name for path in run.iterdir()}
