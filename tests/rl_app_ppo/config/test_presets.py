"""The named layers of a configuration: a run on data never gets the demo's values."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rl_app_ppo.checks.facts import Facts
from rl_app_ppo.checks.registry import preflight
from rl_app_ppo.cli.explain import explain
from rl_app_ppo.cli.main import help_text, main
from rl_app_ppo.cli.option_names import help_of
from rl_app_ppo.config.loading import flat_settings, load_config, options, resolve, to_yaml
from rl_app_ppo.config.presets import algorithms, layer_text, presets
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden"
DATA = ("data.train_files=train.jsonl", "data.val_files=val.jsonl", "model.path=/models/m")


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_configuration_of_a_run_on_data_is_the_committed_one(algorithm):
    """To accept a change, run `just golden` and add a line to the changelog."""
    config = load_config([f"algorithm={algorithm}", *DATA])
    assert to_yaml(config) == (GOLDEN / f"data-{algorithm}.yaml").read_text()


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_with_data_no_value_of_a_demo_applies(algorithm):
    settings = resolve([f"algorithm={algorithm}", *DATA]).settings
    assert {s.origin for s in settings.values()} <= {
        "default",
        "default of model_engine=torch",
        "placement=auto with one actor rank and rollout.name=hf",
        f"algorithm={algorithm}",
        "command line",
    }
    config = load_config([f"algorithm={algorithm}", *DATA])
    assert config.preset == ("none",)
    assert (config.actor.optim.lr, config.actor.optim.lr_warmup_steps) == (1e-6, 0)
    assert (config.actor.clip_ratio_low, config.actor.clip_ratio_high) == (0.2, 0.2)
    assert (config.rollout.response_length, config.critic.optim.lr) == (512, 1e-5)


@pytest.mark.parametrize(
    ("given", "algorithm", "preset"),
    [
        ([], "grpo", "demo"),
        (["algorithm=grpo"], "grpo", "demo"),
        (["algorithm=ppo"], "ppo", "demo-ppo"),
        (["algorithm.name=ppo"], "ppo", "demo-ppo"),
        (["preset=demo-ppo"], "ppo", "demo-ppo"),
        (["preset=demo-calculator"], "grpo", "demo-calculator"),
        (["algorithm=grpo_calculator"], "grpo", "demo-calculator"),
        (["algorithm=ppo", "preset=demo-calculator"], "ppo", "demo-calculator"),
        (["model.path=/outputs/run/checkpoint"], "grpo", "demo"),
        (["preset=none"], "grpo", "none"),
        (["preset="], "grpo", "demo"),
    ],
)
def test_algorithm_and_preset(given, algorithm, preset):
    config = load_config(given)
    assert (config.algorithm.name, config.preset) == (algorithm, (preset,))
    assert config.algorithm.adv_estimator == {"grpo": "grpo", "ppo": "gae"}[algorithm]
    if preset != "none":
        wanted = flat_settings(layer_text("presets", preset))
        wanted.pop("algorithm.name")
        shown = flat_settings(to_yaml(config))
        assert {key: shown[key] for key in wanted} == wanted


@pytest.mark.parametrize("preset", ["preset=demo", "algorithm=grpo_calculator"])
def test_a_preset_of_the_demo_together_with_data_is_refused(preset, capsys):
    assert main(["--cfg", preset, *DATA]) == 2
    assert "has values for the demo's model and task, which do not fit data.train_files='train.jsonl'" in (
        capsys.readouterr().err
    )


def test_a_file_that_holds_the_values_of_a_demo_is_refused_with_data_and_kept_without(tmp_path):
    file = tmp_path / "demo.yaml"
    file.write_text(to_yaml(load_config(["algorithm=ppo"])))
    assert load_config([], file).preset == ("demo-ppo",)
    with pytest.raises(ConfigError, match=r"preset=demo-ppo \(--config .*demo\.yaml\) has values for the demo"):
        load_config(DATA, file)
    file.write_text(to_yaml(load_config(DATA)))
    assert load_config([], file) == load_config(DATA)


def test_a_file_may_name_layers_either_way(tmp_path):
    file = tmp_path / "my.yaml"
    for text in ("algorithm: ppo\n", "algorithm: {name: ppo}\n", "preset: demo-ppo\n"):
        file.write_text(text)
        assert load_config([], file).algorithm.adv_estimator == "gae"


@pytest.mark.parametrize(
    ("text", "override"), [("algorithm: {name: grpo}\n", "algorithm=ppo"), ("preset: demo\n", "preset=demo-ppo")]
)
def test_a_file_and_a_command_line_that_name_different_layers_are_refused(text, override, tmp_path):
    """Otherwise the file's values would silently override the layer from the command line."""
    (tmp_path / "my.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"\(command line\) and .*my\.yaml\) disagree"):
        load_config([override], tmp_path / "my.yaml")


def test_the_layer_a_value_comes_from_is_named():
    for given, origins in (
        (["algorithm=ppo"], {"actor.optim.lr": "preset=demo-ppo", "algorithm.adv_estimator": "algorithm=ppo"}),
        (DATA, {"actor.optim.lr": "default", "actor.use_kl_loss": "algorithm=grpo", "preset": "default"}),
        (["preset=demo", "actor.optim.lr=1"], {"actor.optim.lr": "command line", "preset": "command line"}),
    ):
        resolved = resolve(given)
        for key, origin in origins.items():
            assert f"({origin})" in explain(key, resolved)


def test_presets_compose_in_their_order(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("actor: {optim: {lr: 0.5}}\nlora.rank: 2\nrollout: {n: 4}\n")
    for text in (f"preset=demo-ppo,{mine}", f"preset=[demo-ppo,{mine}]"):
        resolved = resolve([text, "rollout.n=6"])
        config = resolved.config
        assert (config.algorithm.name, config.preset) == ("ppo", ("demo-ppo", str(mine)))
        assert (config.actor.optim.lr, config.rollout.n, config.lora.rank) == (0.5, 6, 2)
        assert resolved.settings["actor.optim.lr"].origin == f"preset={mine}"
        assert explain("rollout.n", resolved).endswith(
            "layers, weakest first: defaults, default of model_engine=torch, placement=auto with one actor rank and "
            f"rollout.name=hf, algorithm=ppo, preset=demo-ppo, preset={mine}, command line\n"
        )
    demo = resolve(["preset=demo-ppo"]).config.actor.optim.lr
    assert resolve([f"preset={mine},demo-ppo"]).config.actor.optim.lr == demo


def test_a_file_of_the_user_is_a_preset_of_a_run_on_data(tmp_path):
    mine = tmp_path / "mine.yml"
    mine.write_text("algorithm: {name: ppo}\nrollout: {n: 4}\n")
    config = load_config([f"preset={mine}", *DATA])
    assert (config.algorithm.adv_estimator, config.rollout.n, config.preset) == ("gae", 4, (str(mine),))
    with pytest.raises(ConfigError, match=r"preset=demo \(command line\) has values for the demo"):
        load_config([f"preset={mine},demo", *DATA])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout: {m: 4}\n", r"Unknown key 'rollout\.m'"),
        ("preset: demo\n", r"a preset can't name presets"),
        ("- 1\n", "expected a mapping"),
    ],
)
def test_a_wrong_preset_file_is_refused(text, message, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config([f"preset={mine}"])
    with pytest.raises(ConfigError, match=r"gone\.yaml: can't be read"):
        load_config([f"preset={tmp_path / 'gone.yaml'}"])


def test_help_lists_algorithms_and_presets_with_what_they_are():
    text = help_text()
    (option,) = [option for option in options() if option.key == "preset"]
    assert all(name in help_of(option) for name in presets())
    for described in (algorithms(), presets()):
        for name, what in described.items():
            assert f"{name} " in text
            assert what
            assert what in text


@pytest.mark.parametrize("preset", sorted(set(presets()) - {"none"}))
def test_a_preset_names_its_algorithm(preset):
    assert yaml.safe_load(layer_text("presets", preset))["algorithm"]["name"] in algorithms()


def test_a_model_that_is_not_the_demos_is_not_trained_with_its_values(make_vision_model):
    given = [f"model.path={make_vision_model()}"]
    with pytest.raises(ConfigError, match=r"is not the demo model .* preset=demo.* Set data\.train_files"):
        preflight(Facts(load_config(given), PluginPolicy()))
    preflight(Facts(load_config([*given, "preset=none", "rollout.response_length=4"]), PluginPolicy()))
