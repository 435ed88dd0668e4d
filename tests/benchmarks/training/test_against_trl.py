"""What keeps the comparison with TRL fair: equal settings, rewards and lengths on all sides."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from bench_against_trl import Run, beside, histogram, measured, our_options, our_settings, require_equal
from harness.grpo_cells import CELLS, SMOKE, bars, make_model
from harness.process_tree import LOOK_S, CommandRun, Line
from peers.grpo_task import ACCURACY, Task, score, warmed_up
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_trainer import OptimConfig
from rl_trainer.rewards.functions import exact_match
from rl_trainer.rewards.gsm8k import score_flexible

ROOT = Path(__file__).parents[3]
TASK = Task(
    model="",
    train=[],
    validation=[],
    reward="last_number",
    steps=4,
    prompts=16,
    n=8,
    mini_batches=4,
    response_length=64,
    test_freq=0,
    lr=1e-6,
    lr_warmup_steps=16,
    kl_coef=0.001,
)


def run_with(**settings: object) -> Run:
    whole = CommandRun(lines=[], seconds=1.0, cpu=1.0, peak_pss_mib=1.0)
    return Run(1.0, 1.0, {}, Counter(), 64.0, {}, None, settings, whole)


@pytest.mark.parametrize("kl_coef", [0.001, 0.0])
def test_the_app_resolves_its_options_to_the_settings_of_the_task(kl_coef: float):
    task = replace(TASK, kl_coef=kl_coef)
    options = [f"{key}={value}" for key, value in our_options(task, task.steps).items()]
    command = [sys.executable, str(ROOT / "apps" / "ppo"), "algorithm=grpo", *options, "--cfg"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = our_settings(yaml.safe_load(done.stdout))
    wanted = task.settings()
    assert {name: found.get(name) for name in wanted if name != "steps"} == {
        name: value for name, value in wanted.items() if name != "steps"
    }


def test_a_setting_that_differs_ends_the_comparison():
    equal, other = run_with(**TASK.settings()), run_with(**TASK.settings() | {"lr": 1e-5})
    require_equal("trl", equal, TASK)
    with pytest.raises(RuntimeError, match="trl ran with lr=1e-05, and 1e-06 was asked"):
        require_equal("trl", other, TASK)
    assert beside({"ours": [equal], "trl": [other]})["lr"] == {"ours": 1e-6, "trl": 1e-5}


def test_seconds_per_step_are_those_between_the_ends_of_steps_without_validation():
    lines = [
        Line(10.0, 5.0, {"step": 0, ACCURACY: 0.3}),
        Line(20.0, 9.0, {"step": 1, "lengths": [9]}),
        Line(23.0, 13.0, {"step": 2, "lengths": [1, 3], "timing_s/gen": 1.0, "timing_s/step": 2.5}),
        Line(30.0, 19.0, {"step": 3, "lengths": [4, 4], "timing_s/gen": 2.0, "timing_s/testing": 5.0, ACCURACY: 0.95}),
    ]
    whole = CommandRun(lines=lines, seconds=31.0, cpu=20.0, peak_pss_mib=1.0)
    run = measured(whole, 2, 3, {}, Counter())
    assert (run.step_s, run.cpu_s, run.stages) == (2.5, 5.0, {"gen": 1.5})
    assert (run.mean_length, run.curve, run.reached_s) == (3, {0: 0.3, 3: 0.95}, 30.0)
    with pytest.raises(RuntimeError, match=r"steps \[4\] were not written"):
        measured(whole, 2, 4, {}, Counter())


def test_steps_whose_lines_were_seen_at_the_same_time_count_as_one_look():
    lines = [Line(10.0, 5.0, {"step": step, "lengths": [1]}) for step in (1, 2)]
    run = measured(CommandRun(lines=lines, seconds=11.0, cpu=5.0, peak_pss_mib=1.0), 2, 2, {}, Counter())
    assert (run.step_s, run.cpu_s) == (LOOK_S, LOOK_S)


@pytest.mark.parametrize("response", ["280", "ab5c+", "7.", "1=2,3", "-4", ".", "", "28 0"])
@pytest.mark.parametrize("truth", ["280", "5", "7.", "-4", ""])
def test_the_peers_score_as_our_rewards_do(response: str, truth: str):
    assert score("exact_match", response, truth) == exact_match("", response, truth)["score"]
    assert score("last_number", response, truth) == score_flexible("", response, truth)["score"]


def test_the_peers_warm_up_as_our_schedule_does():
    ours = [OptimConfig(lr_warmup_steps=16).lr_factor(step) for step in range(1, 40)]
    assert [warmed_up(step, 16) for step in range(1, 40)] == ours


@pytest.mark.parametrize(("ragged", "low", "high"), [(True, 0.2, 0.3), (False, 0.0, 1e-9)])
def test_responses_of_a_random_model_end_with_the_same_probability_everywhere(
    ragged: bool, low: float, high: float, tmp_path: Path
):
    folder = make_model(replace(SMOKE, ragged=ragged), tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        ids = torch.tensor([tokenizer.encode(text) for text in ("37+45=28ab", "00+00=====", "pppppppppp")])
        ends = torch.softmax(model(input_ids=ids).logits, -1)[..., tokenizer.eos_token_id]
    assert low < float(ends.min()) <= float(ends.max()) < high  # 2 / 8 after each token


def test_a_histogram_counts_every_response_once():
    assert histogram(Counter({1: 1, 64: 3})) == [[8.0, 0.25], *([8.0 * i, 0.0] for i in range(2, 8)), [64.0, 0.75]]
    assert histogram(Counter()) == []


def test_each_cell_has_whole_mini_batches_and_bars():
    for cell in CELLS.values():
        assert cell.prompts % cell.mini_batches == 0
        assert bars(cell)["trl"] == ((0.7, 0.5) if cell.ragged or cell.size == "0.33M" else (0.9, 0.75))
