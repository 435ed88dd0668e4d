"""A run takes its prompts in the order of an installed curriculum, and of one that sees scores.

tests/rl_trainer/scenarios/test_resume.py covers resumed runs.
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


REWARD = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    return 0.5 if extra_info["difficulty"] else 1.0
"""


def sums_file(path, difficulties):
    with path.open("w") as file:
        for i, difficulty in enumerate(difficulties):
            row = {
                "data_source": "two_digit_addition",
                "prompt": [{"role": "user", "content": f"{10 + i}+10="}],
                "reward_model": {"ground_truth": str(20 + i)[::-1]},
                "extra_info": {"difficulty": difficulty},
            }
            file.write(json.dumps(row) + "\n")
    return path


@pytest.mark.slow
def test_a_run_draws_the_prompts_near_its_target_most(app, tmp_path):
    """Of 32 prompts, the first 24 score 1 and the last 8 score 0.5, whatever the response."""
    (tmp_path / "judge.py").write_text(REWARD)
    file = sums_file(tmp_path / "sums.jsonl", [0] * 24 + [1] * 8)
    done = app(
        *("--trust", str(tmp_path / "judge.py"), f"reward.function={tmp_path / 'judge.py'}:score"),
        *(f"data.train_files={file}", "trainer.test_freq=0", f"model.cache_dir={tmp_path / 'cache'}"),
        *("data.val_size=512", "data.curriculum=target_score"),
        *("data.train_batch_size=4", "actor.ppo_mini_batch_size=4"),
        *("rollout.n=2", "rollout.response_length=4", "trainer.total_training_steps=12"),
    )
    assert done.code == 0, done.err
    assert "no validation: " in done.out
    assert "first validation" not in done.out
    drawn = {(row.step, row.prompt) for row in read_record(done.folder / "record").trajectories}
    late = [int(prompt[:2]) - 10 for step, prompt in drawn if step > 6]
    assert sum(row >= 24 for row in late) > len(late) / 2  # drawn evenly, they are a quarter
    metrics = [json.loads(line) for line in (done.folder / "metrics.jsonl").read_text().splitlines()]
    seen = [one["curriculum/seen_prompts"] for one in metrics]
    assert seen == sorted(seen)
    assert seen[0] == 4


@pytest.mark.slow
def test_a_run_trains_on_easy_prompts_first(app, install_plugins, tmp_path, monkeypatch):
    site = install_plugins("rl_trainer.curricula", easy_first="someones_curriculum:easy_first")
    (site / "someones_curriculum.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(site))
    difficulties = [i * 7 % 16 for i in range(16)]
    file = sums_file(tmp_path / "sums.jsonl", difficulties)
    done = app(
        *(f"data.{split}_files={file}" for split in ("train", "val")),
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
        first = 4 * (step - 1)
        assert prompts == {f"{10 + difficulties.index(first + i)}+10=" for i in range(4)}
