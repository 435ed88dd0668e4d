"""What the metrics of the last steps show, against numbers just below and above each limit."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from rl_app_ppo.outputs import symptoms as module
from rl_app_ppo.outputs.symptoms import symptoms

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "bad_run.md"

FIRST = {"actor/entropy": 1.0, "critic/score/mean": 0.3}
HEALTHY = {
    **FIRST,
    "actor/grad_norm": 0.1,
    "actor/ppo_kl": 0.01,
    "async/admitted": 8.0,
    "critic/score/mean": 0.5,
    "idle/rollout/starved": 0.3,
    "idle/trainer/starved": 0.4,
    "response_length/truncated_ratio": 0.1,
    "timing_s/step": 1.0,
    "training/off_policy/trajectory_staleness_worst/max": 0.0,
    "training/rollout_probs_diff_mean": 0.001,
}
TRENDS = {
    "truncation": ({"response_length/truncated_ratio": 0.5}, {"response_length/truncated_ratio": 0.49}),
    "log-prob gap": ({"training/rollout_probs_diff_mean": 0.06}, {"training/rollout_probs_diff_mean": 0.05}),
    "step size": ({"actor/ppo_kl": 0.21}, {"actor/ppo_kl": 0.2}),
    "entropy": (
        {"actor/entropy": 0.09, "critic/score/mean": 0.3},
        {"actor/entropy": 0.09, "critic/score/mean": 0.31},
    ),
    "idle rollout": ({"idle/rollout/starved": 0.51}, {"idle/rollout/starved": 0.5}),
    "uneven rollout": ({"rollout/imbalance": 1.51}, {"rollout/imbalance": 1.5}),
    "starved trainer": ({"idle/trainer/starved": 1.02, "timing_s/step": 2.0}, {"timing_s/step": 0.8}),
}


def found(*steps):
    return set(symptoms(FIRST, [{**HEALTHY, **step} for step in steps], tools=False))


@pytest.mark.parametrize("name", TRENDS)
def test_a_trend_is_a_symptom_once_three_steps_in_a_row_show_it(name):
    ill, well = TRENDS[name]
    assert found(ill, ill) == set()
    assert found(ill, ill, well, ill) == set()
    assert found(well, well, well) == set()
    assert found(well, ill, ill, ill) == {name}


def test_the_text_has_the_number_and_a_key():
    texts = symptoms(FIRST, [HEALTHY | ill for ill, _ in TRENDS.values()] * 3, tools=False)
    assert texts == {}
    ill = {key: value for one, _ in TRENDS.values() for key, value in one.items()} | {"idle/rollout/starved": 1.2}
    texts = symptoms(FIRST, [HEALTHY | ill] * 3, tools=False)
    assert texts.keys() == TRENDS.keys()
    assert "50% of the responses" in texts["truncation"]
    assert "rollout.response_length" in texts["truncation"]
    assert "from 1 to 0.09" in texts["entropy"]
    assert "in 51% of the step" in texts["starved trainer"]
    assert "async_rl.max_staleness" in texts["starved trainer"]
    assert "in 60% of the step" in texts["idle rollout"]
    assert "rollout.num_workers" in texts["idle rollout"]
    assert "1.5 times as many tokens" in texts["uneven rollout"]
    assert "rollout.router=least_loaded" in texts["uneven rollout"]


def test_a_small_gap_that_grows_is_a_symptom():
    gap = "training/rollout_probs_diff_mean"
    first, grown, less = {**FIRST, gap: 0.005}, [{**HEALTHY, gap: 0.021}] * 3, [{**HEALTHY, gap: 0.02}] * 3
    assert "grew from 0.005 to 0.021" in symptoms(first, grown, tools=False)["log-prob gap"]
    assert symptoms(first, less, tools=False) == {}
    assert symptoms({**FIRST, gap: 1e-7}, [{**HEALTHY, gap: 0.01}] * 3, tools=False) == {}


def test_a_divergence_beyond_twice_the_target_is_a_symptom():
    far, near = {**HEALTHY, "actor/reward_kl_penalty": 0.21}, {**HEALTHY, "actor/reward_kl_penalty": 0.2}
    text = symptoms(FIRST, [far] * 3, tools=False, target_kl=0.1)["divergence"]
    assert "0.21 nats per token" in text
    assert "algorithm.kl_ctrl.target_kl=0.1" in text
    assert "algorithm.kl_ctrl.kl_coef" in text
    assert symptoms(FIRST, [far, near, far], tools=False, target_kl=0.1) == {}
    assert symptoms(FIRST, [far] * 3, tools=False) == {}


def test_old_weights_explain_a_gap_and_a_synchronous_trainer_waits_by_design():
    stale = {"training/rollout_probs_diff_mean": 0.3, "training/off_policy/trajectory_staleness_worst/max": 1.0}
    assert found(stale, stale, stale) == set()
    waits = {**HEALTHY, "idle/trainer/starved": 0.9, "idle/rollout/starved": 0.9}
    del waits["async/admitted"]
    assert symptoms(FIRST, [waits] * 3, tools=False) == {}


SAME = {"critic/score/min": 0.0, "critic/score/max": 0.0, "critic/score/equal_groups": 1.0}
LEARNS = {"critic/advantages/min": -0.5, "critic/advantages/max": 0.7}
"""Advantages of a critic, which differ although the rewards do not."""


def test_rewards_that_are_all_equal_are_a_symptom_in_the_first_step_of_a_run():
    steps = [{**HEALTHY, **SAME, **LEARNS}]
    text = symptoms(FIRST, steps, tools=False, first_step=True, reward="reward.function=near.py")["equal rewards"]
    assert text.startswith("every response has the reward 0, ")
    assert "reward.function=near.py" in text
    other = {**steps[0], "critic/score/max": 0.1}
    assert symptoms(FIRST, [other], tools=False, first_step=True) == {}
    assert symptoms(FIRST, steps, tools=False, first_step=True, rewarded=False) == {}


def test_in_later_steps_equal_rewards_are_a_symptom_with_zero_advantages_or_three_times_in_a_row():
    assert found(SAME | LEARNS) == set()
    assert found(SAME | LEARNS, SAME | LEARNS) == set()
    assert found(SAME | LEARNS, {**LEARNS, "critic/score/min": 0.0, "critic/score/max": 1.0}, SAME | LEARNS) == set()
    assert found(SAME | LEARNS, SAME | LEARNS, SAME | LEARNS) == {"equal rewards"}
    zero = {"critic/advantages/min": 0.0, "critic/advantages/max": 0.0, "actor/grad_norm": 0.0}
    assert found(SAME | zero) == {"equal rewards"}
    assert found({"actor/grad_norm": 0.0}) == {"gradient"}


def test_a_gradient_norm_is_a_spike_beside_the_median_of_at_least_five_steps():
    usual = [{"actor/grad_norm": norm} for norm in (0.1, 0.2, 0.1, 9.0, 0.1)]
    assert found(*usual, {"actor/grad_norm": 2.1}) == {"gradient spike"}
    assert found(*usual, {"actor/grad_norm": 2.0}) == set()
    assert found(*usual[1:], {"actor/grad_norm": 50.0}) == set()
    text = symptoms(FIRST, [*usual, {"actor/grad_norm": 2.5}], tools=False)["gradient spike"]
    assert "2.5, 25 times the median of the 5 steps before" in text
    assert "actor.optim" in text


def test_updates_that_are_skipped_are_a_symptom_at_once():
    skipped = {"actor/skipped_steps": 2.0, "actor/grad_norm": float("nan")}
    assert found(skipped) == {"skipped updates"}
    assert found(*[HEALTHY] * 6, skipped) == {"skipped updates"}
    usual = [{"actor/grad_norm": norm} for norm in (0.1, 0.2, float("nan"), 0.1, 9.0, 0.1)]
    assert found(*usual, {"actor/grad_norm": 2.1}) == {"gradient spike"}
    text = symptoms(FIRST, [HEALTHY | skipped], tools=False)["skipped updates"]
    assert text.startswith("2 mini-batches had a gradient that is not finite")
    assert "actor.optim.lr" in text
    text = symptoms(FIRST, [HEALTHY | {"actor/skipped_steps": 1.0}], tools=False)["skipped updates"]
    assert text.startswith("1 mini-batch had a gradient")
    not_finite = HEALTHY | skipped | {"critic/advantages/mean": float("nan")}
    text = symptoms(FIRST, [not_finite], tools=False)["skipped updates"]
    assert "algorithm.adv_estimator" in text
    assert "actor.optim.lr" not in text


def test_updates_of_the_critic_that_are_skipped_are_a_symptom_at_once():
    skipped = {"critic/skipped_steps": 3.0, "critic/grad_norm": float("nan")}
    assert found(skipped) == {"skipped critic updates"}
    assert found(skipped | {"actor/skipped_steps": 1.0}) == {"skipped critic updates", "skipped updates"}
    assert found({"critic/skipped_steps": 0.0}) == set()
    text = symptoms(FIRST, [HEALTHY | skipped], tools=False)["skipped critic updates"]
    assert text.startswith("3 mini-batches of the critic had a gradient that is not finite")
    assert "critic.optim.lr" in text


def test_tool_calls_that_fail_are_a_symptom_if_all_do_or_half_of_them_three_times_in_a_row():
    def step(calls, errors):
        return {"agent/tool_calls/max": 3.0, "agent/tool_calls/mean": calls, "agent/tool_errors/mean": errors}

    most, half, few = step(0.8, 0.79), step(0.8, 0.4), step(0.8, 0.39)
    assert found(step(0.8, 0.8)) == {"tool errors"}
    assert found(most, most) == found(few, half, half) == found(half, few, half) == set()
    assert found(most, half, half) == found(few, half, half, half) == {"tool errors"}
    assert found(step(0.0, 0.0)) == set()
    steps = [HEALTHY | step(0.8, 0.6)] * 3
    assert symptoms(FIRST, steps, tools=True)["tool errors"].startswith("75% of the tool calls")


def test_nothing_is_asked_of_metrics_that_a_run_has_not():
    assert symptoms({}, [{}] * 10, tools=True) == {}


def test_the_guide_lists_all_symptoms():
    """And `reward`, the alarm of failing reward functions (training_warnings)."""
    nodes = list(ast.walk(ast.parse(Path(module.__file__).read_text())))
    keys = [key for node in nodes if isinstance(node, ast.Dict) for key in node.keys]
    keys += [node.slice for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)]
    names = {key.value for key in keys if isinstance(key, ast.Constant)}
    assert names >= TRENDS.keys()
    table = GUIDE.read_text().partition("| alarm |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| ([\w -]+) \|", table, flags=re.M)) == names | {"reward"}
