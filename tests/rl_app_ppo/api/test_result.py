"""The result of a run is read from its folder."""

from __future__ import annotations

import json
from pathlib import Path

from rl_app_ppo.api.result import TrainResult
from rl_app_ppo.outputs.run_folder import RunFiles


def test_metrics_history_and_paths(tmp_path: Path):
    files = RunFiles(folder=tmp_path)
    lines = [{"step": 0, "val-core/sums/acc/mean@1": 0.25}, {"step": 2, "critic/score/mean": 0.5}]
    files.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (files.checkpoints / "step-000002").mkdir(parents=True)
    result = TrainResult.of(files, 2)
    assert result.metrics == lines[1]
    assert result.history == lines
    assert result.run_folder == tmp_path
    assert result.checkpoint == tmp_path / "checkpoints" / "step-000002"
    assert result.model == tmp_path / "checkpoint"
    assert "score" not in repr(result)
    assert str(result.model) in repr(result)


def test_a_run_without_steps(tmp_path: Path):
    result = TrainResult.of(RunFiles(folder=tmp_path), 0)
    assert (result.metrics, list(result.history), result.checkpoint) == ({}, [], None)
