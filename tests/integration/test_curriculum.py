"""A run takes its prompts in the order of an installed curriculum.

tests/rl_trainer/scenarios/test_resume.py covers a resumed run.
"""

from __future__ import annotations

import json

import pytest

from rl_trainer.record.read_record import read_record

PACKAGE = """
import numpy as np
from rl_trainer import CurriculumKind

class EasyFirst:
    def __init__(self, rows):
        self.difficulty = [rows[i].extra_info["difficulty"] for i in range(len(rows))]

    def epoch(self, number, rng):
        return np.argsort(self.difficulty, kind="stable")

easy_first = CurriculumKind(EasyFirst)
"""


@pytest.mark.slow
def test_a_run_trains_on_easy_prompts_first(app, install_plugins, tmp_path, monkeypatch):
    site = install_plugins("rl_trainer.curricula", easy_first="someones_curriculum:easy_first")
    (site / "someones_curriculum.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(site))
    difficulties = [i * 7 % 16 for i in range(16)]
    with (tmp_path / "sums.jsonl").open("w") as file:
        for difficulty in difficulties:
            row = {
                "data_source": "two_digit_addition",
                "prompt": [{"role": "user", "content": f"{10 + difficulty}+10="}],
                "reward_model": {"ground_truth": str(20 + difficulty)[::-1]},
                "extra_info": {"difficulty": difficulty},
            }
            file.write(json.dumps(row) + "\n")
    done = app(
        *(f"data.{split}_files={tmp_path / 'sums.jsonl'}" for split in ("train", "val")),
        f"model.cache_dir={tmp_path / 'cache'}",
        "data.curriculum=easy_first",
        "data.val_size=512",  # the demo's default; a run on data files does not read it
        "data.train_batch_size=4",
        "actor.ppo_mini_batch_size=4",
        "rollout.n=2",
        "rollout.response_length=4",
        "trainer.test_freq=1",
    )
    assert done.code == 0, done.err
    rows = read_record(done.folder / "record").trajectories
    for step in (1, 2):
        prompts = {row.prompt for row in rows if row.step == step}
        assert prompts == {f"{10 + 4 * (step - 1) + i}+10=" for i in range(4)}
