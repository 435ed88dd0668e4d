"""A run on two data sources: rewards train one, the answers of the data the other."""

from __future__ import annotations

import json
import os
import random
import subprocess

import pytest
from app_runs import MARK, PATIENT, command

ACCURACY = "val-core/{}/acc/mean@1"


def write_sums(folder):
    """Rows of the demo's task: `carry` where the ones add up to ten or more, else `plain`."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    for name, part in (("train", pairs[:2000]), ("val", pairs[2000:2128])):
        rows = [
            {
                "prompt": f"{a}+{b}=",
                "data_source": "carry" if a % 10 + b % 10 > 9 else "plain",
                "reward_model": {"ground_truth": str(a + b)},
            }
            for a, b in part
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"data.{name}_files={folder / f'{name}.jsonl'}" for name in ("train", "val")]


@pytest.mark.slow
def test_one_source_learns_from_answers_and_the_other_from_rewards(tmp_path, demo_models, mark):
    """The demo's model forgets to carry: it solves nearly no row of `carry`, which rewards need."""
    arguments = command(
        *write_sums(tmp_path),
        f"model.cache_dir={demo_models}",
        f"trainer.output_dir={tmp_path}",
        "trainer.run_name=run",
        PATIENT,
        "algorithm=grpo",
        "algorithm.by_source=rl_coef=0@carry,sft_coef=1@carry,adv_estimator=rloo@plain",
        "reward.function=exact_match@plain,exact_match@carry",
        "rollout.response_length=4",
        "rollout.n=8",
        "data.train_batch_size=64",
        "actor.ppo_mini_batch_size=16",
        "actor.optim.lr=4e-4",
        "trainer.total_training_steps=10",
        "trainer.test_freq=10",
    )
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=500, check=False, env={**os.environ, MARK: mark}
    )
    assert done.returncode == 0, done.stderr
    first, *steps = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    for source, least in (("carry", 0.4), ("plain", 0.25)):
        assert steps[-1][ACCURACY.format(source)] >= first[ACCURACY.format(source)] + least
    assert steps[-1]["actor/ce_loss"] < steps[0]["actor/ce_loss"] / 2
    for step in steps:
        assert step["source/plain/tokens"] > step["source/carry/tokens"] == 0
        assert step["demonstration/score/min"] == 1.0
        assert "source/carry/score/mean" not in step
        assert step["source/plain/score/mean"] == step["critic/score/mean"]
