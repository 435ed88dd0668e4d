"""What the checks look at."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rl_app_ppo.checks.facts import Facts
from rl_app_ppo.config.loading import load_config
from rl_ckpt_engine import PluginPolicy


def folder_of(*words: str) -> Path:
    return Facts(load_config(words), PluginPolicy()).folder


def test_runs_of_the_same_second_get_different_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda pattern: pattern.replace("%Y-%m-%d_%H-%M-%S", "now"))
    output = f"trainer.output_dir={tmp_path}"
    for name in ("now_grpo_seed0", "now_grpo_seed0_2", "now_grpo_seed0_3"):
        folder = folder_of(output)
        assert folder == tmp_path / name
        folder.mkdir()
    assert folder_of(output, "trainer.seed=1") == tmp_path / "now_grpo_seed1"
    (tmp_path / "mine").mkdir()
    assert folder_of(output, "trainer.run_name=mine") == tmp_path / "mine", "a given name is never changed"
