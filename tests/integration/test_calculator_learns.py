"""The calculator demo learns: the score rises as the policy learns to call the tool."""

from __future__ import annotations

import json

import pytest

from rl_app_ppo.demo.calculator_chats import LLAMA3, QWEN

ACCURACY = "val-core/three_digit_multiplication/acc/mean@1"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("demo", "chat"), [("calculator", QWEN), ("calculator_llama3", LLAMA3)])
def test_the_score_rises_because_of_the_tool(app, calculator_models, demo, chat):
    """The policy calls the tool in the dialect of its chat template."""
    common = (
        "algorithm=grpo_calculator",
        f"data.demo={demo}",
        f"model.path={calculator_models(demo)}",
        "data.val_size=64",
        "data.train_batch_size=32",
        "trainer.test_freq=0",
    )
    done = app(*common, "trainer.total_training_steps=5", timeout=500)
    assert done.code == 0, done.err
    before, *steps = done.metrics
    after = steps[-1]
    assert before[ACCURACY] <= 0.2
    assert after[ACCURACY] >= 0.6
    assert before["val-aux/num_turns/mean"] <= 1.2  # the policy guesses immediately
    assert after["val-aux/num_turns/mean"] >= 1.8
    assert steps[0]["agent/tool_calls/mean"] < 0.5 < after["agent/tool_calls/mean"]
    # only tokens of the policy count, in every turn
    assert max(m["training/rollout_log_probs_diff_max"] for m in steps) < 1e-4
    samples = [json.loads(line) for line in (done.folder / "samples" / "5.jsonl").read_text().splitlines()]
    for sample in samples:
        if sample["outcome"]["numbers"]["acc"]:
            assert sample["response"].startswith(chat.call[0])
            assert sample["response"].endswith(f"\n{sample['ground_truth']}")
            assert '"description": "Evaluates an arithmetic expression' in sample["prompt"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_the_tool_nothing_is_right(app, calculator_model):
    common = (
        "algorithm=grpo_calculator",
        f"model.path={calculator_model}",
        "data.val_size=64",
        "data.train_batch_size=32",
        "trainer.test_freq=0",
    )
    alone = app(
        *common, "rollout.session=single_turn", "trainer.run_name=alone", "trainer.total_training_steps=1", timeout=300
    )
    assert alone.code == 0, alone.err
    lines = [json.loads(line) for line in (alone.folder.parent / "alone" / "metrics.jsonl").read_text().splitlines()]
    assert [m[ACCURACY] for m in lines if ACCURACY in m] == [0.0, 0.0]
    assert max(m["critic/score/max"] for m in lines[1:]) == 0.0
    assert not any("num_turns/mean" in m for m in lines)
