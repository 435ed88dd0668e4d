"""Each symptom of a run that does not learn is printed once, with the key to check."""

from __future__ import annotations

import pytest

from rl_app_ppo.outputs.training_warnings import RewardFailures, TrainingWarnings
from rl_trainer.driver.hooks import notify

HEALTHY = {
    "critic/score/equal_groups": 0.5,
    "critic/advantages/max": 1.0,
    "critic/advantages/min": -1.0,
    "response_length/truncated_ratio": 0.9,
    "actor/grad_norm": 0.1,
    "agent/tool_calls/max": 1.0,
}


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (
            {"critic/score/equal_groups": 1.0, "critic/advantages/max": 0.0, "critic/advantages/min": 0.0},
            ["same reward", "reward.function", "rollout.n"],
        ),
        ({"response_length/truncated_ratio": 1.0}, ["cut off", "rollout.response_length"]),
        ({"actor/grad_norm": 0.0}, ["gradient of the policy is zero", "algorithm.adv_estimator"]),
        ({"agent/tool_calls/max": 0.0}, ["no response called a tool", "rollout.session"]),
        ({"transfer_queue/damaged_blocks": 2.0}, ["2 blocks", "damaged in memory", "transfer_queue.verify"]),
    ],
)
def test_each_symptom_is_said_once_and_names_the_key_to_look_at(metrics, words, tmp_path):
    lines = []
    warnings = TrainingWarnings(lines.append, tools=True, reward_log=tmp_path / "reward.log")
    warnings.look(1, HEALTHY)
    warnings.look(1, {})
    assert (lines, warnings.seen) == ([], False)
    for step in (2, 3):
        warnings.look(step, {**HEALTHY, **metrics})
    (line,) = lines
    assert line.startswith("warning: step 2: ")
    assert all(word in line for word in words)
    assert warnings.seen


def test_equal_rewards_that_teach_are_no_symptom_and_neither_are_tools_that_there_are_not(tmp_path):
    """With a critic, or a baseline across prompts, equal rewards still give nonzero advantages."""
    lines = []
    warnings = TrainingWarnings(lines.append, tools=False, reward_log=tmp_path)
    warnings.look(1, {**HEALTHY, "critic/score/equal_groups": 1.0, "agent/tool_calls/max": 0.0})
    assert lines == []


def test_failing_rewards_are_said_with_file_line_and_count(tmp_path):
    lines = []
    warnings = TrainingWarnings(lines.append, tools=False, reward_log=tmp_path / "reward.log")
    for step in (0, 1):
        hooks = {"reward failures": RewardFailures(warnings)}
        notify(hooks, "on_reward_failure", step, 5, 80, "raised ValueError: a one (near.py:3)")
    assert lines == [
        "warning: step 0: reward.function failed on 5 of 80 responses, which have no score: it raised ValueError: a one (near.py:3). "
        f"Each failure is in {tmp_path / 'reward.log'}"
    ]
    assert warnings.reward_failures == 10
