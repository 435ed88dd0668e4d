"""`train()` turns its arguments into the configuration of the command line, or refuses them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rl_app_ppo import train
from rl_app_ppo.cluster import ray_session
from rl_app_ppo.config.loading import load_config
from rl_protocol import ConfigError
from rl_protocol.support.trusted_files import trusted_files
from rl_trainer.rewards.functions import exact_match

ROWS = [{"prompt": "1+2=", "data_source": "sums", "reward_model": {"ground_truth": "3"}}] * 64
HOME = "model.cache_dir"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The arguments of every run that would start; other tests may have imported Ray."""
    runs: list[object] = []
    module = sys.modules["rl_app_ppo.api.train"]
    monkeypatch.setattr(ray_session, "check_ray_is_free", lambda config: None)
    monkeypatch.setattr(module, "launch", lambda *arguments: runs.append(arguments))
    return runs


def test_without_arguments_it_is_the_demo(launched):
    train()
    ((config, _, console, variables),) = launched
    assert config == load_config()
    assert not console.quiet
    assert variables == {}


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (["algorithm=ppo", "rollout.n=4", "trainer.logger=[console,wandb]"], {}),
        ({"algorithm": "ppo", "rollout.n": 4, "trainer": {"logger": ["console", "wandb"]}}, {}),
        ((), {"algorithm": "ppo", "rollout": {"n": 4}, "trainer": {"logger": "console,wandb"}}),
        ({"algorithm": "ppo", "rollout": {"n": 8}}, {"rollout.n": 4, "trainer": {"logger": ("console", "wandb")}}),
    ],
)
def test_settings_have_the_spelling_of_the_command_line(launched, options, settings):
    train(options=options, **settings)
    assert launched[0][0] == load_config(["algorithm=ppo", "rollout.n=4", "trainer.logger=console,wandb"])


def test_a_second_run_at_the_same_time_is_refused(launched, monkeypatch: pytest.MonkeyPatch):
    starts, ends = threading.Event(), threading.Event()

    def launch(*arguments: object) -> None:
        launched.append(arguments)
        starts.set()
        assert ends.wait(60)

    monkeypatch.setattr(sys.modules["rl_app_ppo.api.train"], "launch", launch)
    first = threading.Thread(target=train)
    first.start()
    try:
        assert starts.wait(60)
        with pytest.raises(ConfigError, match=r"in another thread .* Wait for its end"):
            train()
    finally:
        ends.set()
        first.join(60)
    train()
    assert len(launched) == 2


def test_objects_become_paths_in_the_cache(launched, tmp_path: Path):
    train("my-model", ROWS, exact_match, val_dataset=ROWS[:3], options={HOME: tmp_path}, quiet=True)
    ((config, _, console, variables),) = launched
    assert console.quiet
    assert config.model.path == "my-model"
    assert config.preset == ("none",)
    for (file,), lines in ((config.data.train_files, 64), (config.data.val_files, 3)):
        assert Path(file).is_relative_to(tmp_path)
        assert len(Path(file).read_text().splitlines()) == lines
    assert list(trusted_files(variables)) == [config.reward.function.partition(":")[0]]


def test_files_of_code_load_if_the_caller_trusts_them(launched, tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("from rl_trainer.algorithms.advantages import Estimator, grpo\nMINE = Estimator(grpo)\n")
    options = {"algorithm.adv_estimator": f"{file}:MINE"}
    with pytest.raises(ConfigError, match=r"in Python, trust=\['.*mine\.py'\] to train\(\)"):
        train(options=options)
    train(options=options, trust=[file])
    assert launched[0][0].algorithm.adv_estimator == f"{file}:MINE"
    assert "RL_TRUSTED_FILES" not in os.environ


class Saved:
    """A model or tokenizer that writes one file."""

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "saved").write_text("")


@pytest.mark.parametrize(
    ("arguments", "kinds"),
    [
        ({"model": Saved(), "tokenizer": Saved()}, {"model"}),
        ({"model": "my-model", "reward": exact_match}, {"reward"}),
        ({"model": "my-model", "reward": ["exact_match", exact_match]}, {"reward"}),
    ],
)
def test_the_cache_of_objects_may_be_set_with_the_demo_data(launched, tmp_path: Path, arguments, kinds):
    train(**arguments, options={HOME: tmp_path, "rollout.response_length": 8})
    assert launched[0][0].model.cache_dir == str(tmp_path)
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == kinds


@pytest.mark.parametrize("arguments", [{"model": "my-model"}, {"model": "my-model", "reward": "exact_match"}])
def test_a_cache_into_which_nothing_is_written_is_refused(launched, tmp_path: Path, arguments):
    with pytest.raises(
        ConfigError, match=f"{HOME}=.* has no effect: nothing reads it without anything to cache: the demo model"
    ):
        train(**arguments, options={HOME: tmp_path})
    assert launched == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"options": {"rolout.n": 4}}, "Unknown key 'rolout.n' in options. Did you mean 'rollout.n'"),
        ({"options": ["rollout.n"]}, "Not an override: 'rollout.n'"),
        ({"options": "rollout.n=4"}, "options must be a dict, or a list"),
        ({"rollout": {"n": "many"}}, "rollout.n must be of type int; got 'many'"),
        ({"rollout": {"n": None}}, "rollout.n must be of type int; got None"),
        ({"rollout": 3}, r"rollout in keywords of train\(\) is a group of settings"),
        ({"data.train_batch_size": -8}, "data.train_batch_size must be at least 1"),
        ({"train_dataset": [3]}, r"train_dataset\[0\] must be a row"),
        ({"reward_weights": [1.0]}, "reward_weights has no effect without reward"),
        (
            {"model": "a", "options": {"model.path": "b"}},
            "model.path is set twice: by an argument of .*, and in options",
        ),
        ({"train_dataset": ROWS, "data": {"train_files": "b"}}, "data.train_files is set twice"),
        ({"train_dataset": ROWS, "preset": "demo"}, "preset=demo .*data.train_files='train_dataset'"),
        ({"reward": lambda *_: 1.0}, "it is a lambda"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_written(launched, tmp_path: Path, arguments, words):
    given = {"options": {HOME: str(tmp_path / "cache")}} if "train_dataset" in arguments else {}
    with pytest.raises(ConfigError, match=words):
        train(**(given | arguments))
    assert launched == []
    assert list(tmp_path.iterdir()) == []


def test_importing_does_nothing():
    program = (
        "import os, signal, sys, threading\nbefore = dict(os.environ), signal.getsignal(signal.SIGTERM)\n"
        "import rl_app_ppo\nassert callable(rl_app_ppo.train)\n"
        "assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == before\n"
        "assert threading.active_count() == 1\n"
        "print([name for name in ('torch', 'ray', 'transformers', 'datasets', 'pyarrow', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "[]"


def test_ray_that_runs_in_this_process_is_refused(launched, monkeypatch: pytest.MonkeyPatch):
    def refuse(config: object) -> None:
        raise ConfigError("Ray runs already")

    monkeypatch.setattr(ray_session, "check_ray_is_free", refuse)
    with pytest.raises(ConfigError, match="Ray runs already"):
        train()
    assert launched == []
