"""What a run says of itself: a banner that is true, warnings once, an outcome that does not look like success where nothing was learnt."""

from __future__ import annotations

import threading

import pytest
from rich.console import Console

from rl_app_ppo.banner import described
from rl_app_ppo.config import load_config
from rl_app_ppo.console import Screen, step_line
from rl_app_ppo.layers import presets
from rl_app_ppo.recorder import Recorder, RunFiles
from rl_app_ppo.startup import Startup
from rl_app_ppo.symptoms import RewardFailures, Symptoms
from rl_trainer.hooks import tell

DATA = ("data.train_files=a.jsonl", "data.val_files=b.jsonl", "model.path=/models/m")
HEALTHY = {
    "critic/score/equal_groups": 0.5,
    "critic/advantages/max": 1.0,
    "critic/advantages/min": -1.0,
    "response_length/truncated_ratio": 0.9,
    "actor/grad_norm": 0.1,
    "agent/tool_calls/max": 1.0,
}


# -- the banner
def test_the_banner_of_the_demo_says_preset_task_and_how_answers_are_written():
    said = described(load_config())
    assert said["preset"] == f"demo: {presets()['demo']}"
    assert "answers written units first (37+45= is answered by 280, that is 082)" in said["task"]
    assert said["actor"] == "lr 0.0004, warm-up of 16 updates, mini-batches of 16 prompts, clip 0.2 / 0.28"
    assert said["trained"] == "all weights, by torch on cpu in float32"
    assert "at most 4 tokens per response" in said["rollout"]
    assert said["workers"] == "2 rollout, reward, actor, reference; Ray (local)"
    assert said["data plane"] == "rl-transferqueue, 2 storage units, shared memory"
    assert "critic" not in said
    assert "calculator" in described(load_config(["preset=demo-calculator"]))["task"]


@pytest.mark.parametrize(
    ("overrides", "workers"),
    [
        (["actor.use_kl_loss=false"], "2 rollout, reward, actor; "),
        (["lora.rank=8"], "2 rollout, reward, actor, reference (the actor without its adapter); "),
        (["algorithm=ppo"], "2 rollout, reward, actor, reference, critic; "),
        (["algorithm=ppo", *DATA], "2 rollout, reward, actor, critic; "),
        (["model_engine=fsdp", "fsdp.world_size=2"], "2 rollout, reward, actor x 2, reference x 2; "),
    ],
)
def test_the_banner_names_the_workers_there_are(overrides, workers):
    assert described(load_config(overrides))["workers"] == f"{workers}Ray (local)"


def test_the_banner_names_engine_device_adapter_and_dtype():
    fsdp = load_config(["model_engine=fsdp", "fsdp.device=cpu", "fsdp.param_dtype=bfloat16", "lora.rank=8", *DATA])
    said = described(fsdp)
    assert said["trained"] == f"LoRA of rank 8, alpha {fsdp.lora.alpha:g}, on all-linear, by fsdp on cpu in bfloat16"
    assert said["preset"] == "none: the defaults of the algorithm"
    assert said["task"] == "a.jsonl, validated with b.jsonl, prompts of at most 512 tokens"
    assert said["model"] == "/models/m"
    assert "OFF" in described(load_config(["checkpoint_engine.enabled=false"]))["weights"]


def test_the_column_kl_is_the_divergence_from_the_reference_or_is_not_there():
    assert "  kl  0.2500  " in step_line(1, 2, {"actor/ref_kl": 0.25, "actor/ppo_kl": 7.0})
    assert "  kl  0.2500  " in step_line(1, 2, {"actor/reward_kl_penalty": 0.25, "actor/ppo_kl": 7.0})
    assert "kl" not in step_line(1, 2, {"actor/ppo_kl": 7.0})


def test_only_what_is_there_is_listed(tmp_path):
    files = RunFiles(folder=tmp_path)
    assert files.written() == {}
    files.metrics.write_text("")
    files.checkpoint.mkdir()
    assert files.written() == {"metrics": files.metrics, "checkpoint": files.checkpoint}


# -- warnings
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
    ],
)
def test_each_symptom_is_said_once_and_names_the_key_to_look_at(metrics, words, tmp_path):
    lines = []
    symptoms = Symptoms(lines.append, tools=True, reward_log=tmp_path / "reward.log")
    symptoms.look(1, HEALTHY)
    symptoms.look(1, {})
    assert (lines, symptoms.seen) == ([], False)
    for step in (2, 3):
        symptoms.look(step, {**HEALTHY, **metrics})
    (line,) = lines
    assert line.startswith("warning: step 2: ")
    assert all(word in line for word in words)
    assert symptoms.seen


def test_equal_rewards_that_teach_are_no_symptom_and_neither_are_tools_that_there_are_not(tmp_path):
    """With a critic, or a baseline across prompts, advantages are not zero although the rewards of a prompt are equal."""
    lines = []
    symptoms = Symptoms(lines.append, tools=False, reward_log=tmp_path)
    symptoms.look(1, {**HEALTHY, "critic/score/equal_groups": 1.0, "agent/tool_calls/max": 0.0})
    assert lines == []


def test_failing_rewards_are_said_with_file_line_and_count(tmp_path):
    lines = []
    symptoms = Symptoms(lines.append, tools=False, reward_log=tmp_path / "reward.log")
    for step in (0, 1):
        hooks = {"reward failures": RewardFailures(symptoms)}
        tell(hooks, "on_reward_failure", step, 5, 80, "raised ValueError: a one (near.py:3)")
    assert lines == [
        "warning: step 0: reward.function failed on 5 of 80 responses, which have no score: it raised ValueError: a one (near.py:3). "
        f"Each failure is in {tmp_path / 'reward.log'}"
    ]
    assert symptoms.reward_failures == 10


@pytest.mark.parametrize(
    ("accuracies", "failures", "words"),
    [
        ([0.25, 0.75], 0, "validation accuracy 0.250 -> 0.750"),
        ([0.25, 0.75], 3, "validation accuracy 0.250 -> 0.750; reward.function failed on 3 responses"),
        ([0.0, 0.0], 0, "0.000 -> 0.000: nothing was learnt; look at reward.function, actor.optim.lr and samples/"),
        ([0.0, 0.0], 3, "nothing was learnt; see the warnings above; reward.function failed on 3 responses"),
        ([0.5, 0.25], 0, "0.500 -> 0.250: it fell; look at"),
        ([], 0, "no step was done"),
    ],
)
def test_the_last_line_says_where_nothing_was_learnt(accuracies, failures, words, tmp_path):
    recorder, symptoms = _recorder(tmp_path, [])
    for step, accuracy in enumerate(accuracies):
        recorder.on_step(step, {"val-core/x/acc/mean@1": accuracy})
    if failures:
        symptoms.reward_failed(1, failures, 8, "raised")
    assert words in recorder.outcome()


def test_without_validation_the_outcome_is_that_of_training(tmp_path):
    recorder, _ = _recorder(tmp_path, [])
    for step, accuracy in ((1, 0.25), (2, 0.5)):
        recorder.on_step(step, {"critic/acc/mean": accuracy})
    assert recorder.outcome() == "training accuracy 0.250 -> 0.500"


# -- the start
class Sink:
    def __init__(self):
        self.lines = []

    def log(self, step, metrics):
        self.lines.append((step, dict(metrics)))


def _recorder(tmp_path, sinks):
    screen = Screen(Console(quiet=True))
    symptoms = Symptoms(screen.note, tools=False, reward_log=tmp_path / "reward.log")
    startup = Startup(lambda _: None)
    with startup.phase("ray", "starting Ray"):
        pass
    return Recorder(screen, sinks, 5, symptoms, startup), symptoms


def test_the_first_line_of_metrics_holds_the_times_of_the_start_and_no_other_does(tmp_path):
    sink = Sink()
    recorder, _ = _recorder(tmp_path, [sink])
    recorder.on_step(0, {"a": 1.0})
    recorder.on_step(1, {"a": 2.0})
    (_, first), second = sink.lines
    assert first.keys() == {"a", "startup_s/ray", "startup_s/total"}
    assert 0 <= first["startup_s/ray"] <= first["startup_s/total"]
    assert second == (1, {"a": 2.0})


def test_a_start_says_which_phase_is_under_way_also_while_it_blocks():
    said, enough = [], threading.Event()

    def say(line):
        said.append(line)
        if len(said) >= 2:
            enough.set()

    startup = Startup(say, every_s=0.01)
    with startup.phase("models", "workers load their models"):
        assert enough.wait(30)
    startup.end()
    count = len(said)
    assert all(line.startswith("  workers load their models (") for line in said)
    assert not startup._thread.is_alive()
    startup.end()
    assert len(said) == count
    assert startup.metrics().keys() == {"startup_s/models", "startup_s/total"}
