"""The Countdown demo learns: the policy stops writing a wrong last operator."""

from __future__ import annotations

import json

import pytest

ACCURACY = "val-core/countdown/acc/mean@1"
VALIDATION = 128


@pytest.fixture(scope="module")
def countdown_model(make_demo_model):
    """The base model of the demo, with a smaller validation split."""
    from rl_app_ppo.demo.demos import DEMOS
    from rl_app_ppo.demo.settings import WarmUpSettings

    demo = DEMOS["countdown"]
    shares = {"careless_share": demo.careless_share, "target_probability": demo.target_probability}
    return make_demo_model(WarmUpSettings(demo="countdown", **shares, train_size=3600, validation_size=VALIDATION))


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_third_of_the_demo_raises_the_accuracy_by_half(app, countdown_model):
    """Of validation puzzles, none of which is trained on in any order of its numbers."""
    done = app(
        "preset=demo-countdown",
        f"model.path={countdown_model}",
        f"data.val_size={VALIDATION}",
        *("data.train_batch_size=64", "actor.ppo_mini_batch_size=16"),
        *("trainer.total_training_steps=10", "trainer.test_freq=0"),
    )
    assert done.code == 0, done.err
    before, *steps = done.metrics
    assert before[ACCURACY] <= 0.35
    assert steps[-1][ACCURACY] >= 1.5 * before[ACCURACY]
    samples = [json.loads(line) for line in (done.folder / "samples" / "10.jsonl").read_text().splitlines()]
    right = [sample for sample in samples if sample["outcome"]["numbers"]["acc"]]
    assert right
    for sample in right:
        assert eval(sample["response"]) == json.loads(sample["ground_truth"])["target"]
