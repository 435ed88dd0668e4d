"""Configuration: layers, types, the nearest key in errors, and cross-field checks."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from rl_app_ppo.cli.main import help_text, main, parse
from rl_app_ppo.config.full_keys import with_full_keys
from rl_app_ppo.config.loading import (
    algorithm_label,
    flat_settings,
    from_yaml,
    load_config,
    options,
    resolve,
    shown_yaml,
    to_yaml,
)
from rl_app_ppo.config.presets import presets
from rl_app_ppo.config.unused_options import unused
from rl_protocol import ConfigError
from rl_trainer.config.rollout_correction import Bounds


def test_defaults_presets_file_and_overrides_in_that_order(tmp_path):
    assert load_config().algorithm.name == "grpo"
    assert load_config(["algorithm=ppo"]).algorithm.adv_estimator == "gae"
    file = tmp_path / "my.yaml"
    file.write_text("algorithm: {name: ppo}\nrollout: {n: 4, num_workers: 1}\n")
    config = load_config(["rollout.n=6"], file)
    assert (config.algorithm.adv_estimator, config.rollout.n, config.rollout.num_workers) == ("gae", 6, 1)


def test_dotted_overrides_are_typed():
    config = load_config(["actor.optim.lr=1e-5", "rollout.n=16", "actor.use_kl_loss=false", "trainer.run_name=x"])
    assert (config.actor.optim.lr, config.rollout.n, config.actor.use_kl_loss, config.trainer.run_name) == (
        1e-5,
        16,
        False,
        "x",
    )


@pytest.mark.parametrize("name", ["1e-5", "1.50", "007", "2026-11-29"])
def test_a_text_that_reads_as_a_number_is_kept(name):
    assert load_config([f"trainer.run_name={name}"]).trainer.run_name == name


@pytest.mark.parametrize("key", ["model.path", "lora.adapter_path", "reference.path", "trainer.output_dir"])
def test_a_name_that_no_file_can_have_is_refused(key):
    with pytest.raises(ConfigError, match=rf"^{key} must have names of at most 255 bytes .* got one of 256 bytes"):
        load_config([f"{key}=folder/{'ä' * 128}"])
    with pytest.raises(ConfigError, match=r"^data.train_files must have names of at most 255"):
        load_config(["model.path=m", f"data.train_files=[a.jsonl,{'b' * 256}]"])


@pytest.mark.parametrize("preset", presets())
def test_what_cfg_prints_is_what_a_file_may_hold(preset, tmp_path):
    teacher = ["reference.path=teacher"] if preset == "demo-opd" else []
    config = load_config([f"preset={preset}", *teacher])
    assert from_yaml(to_yaml(config)) == config
    file = tmp_path / "resolved.yaml"
    file.write_text(to_yaml(config))
    assert load_config([], file) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.optim.lrr=1", r"Unknown key 'actor\.optim\.lrr'\. Did you mean 'actor\.optim\.lr'\?"),
        ("rolout.n=8", r"Did you mean 'rollout\.n'\?"),
        ("actor.temperature=1", r"Did you mean 'rollout\.temperature'\?"),
        ("trainer.training_steps=3", r"Did you mean 'trainer\.total_training_steps'\?"),
        ("rollout.n=abc", r"rollout\.n must be of type int; got 'abc'"),
        ("rollout.n=2.5", r"rollout\.n must be of type int; got 2\.5"),
        ("actor.optim.lr=fast", r"actor\.optim\.lr must be of type float; got 'fast'"),
        ("actor.use_kl_loss=maybe", r"actor\.use_kl_loss must be of type bool"),
        ("rollout.n=", r"rollout\.n must be of type int; got ''"),
        ("rollout.n=${rollout.m}", r"rollout\.n refers to a value that can't be read: .*'rollout\.m' not found\."),
        ("rollout.n=${rollout.n}", r"rollout\.n refers to a value that can't be read: Recursive"),
        ("rollout.n=${algorithm.name}", r"rollout\.n refers to a value that can't be read: .*'grpo'"),
        ("rollout.n=null", r"rollout\.n must be of type int"),
        ("data.train_batch_size=-4", r"data\.train_batch_size must be at least 1; got -4"),
        *(
            (f"{key}=inf", rf"{key} must be .*finite; got inf")
            for key in (
                "algorithm.rl_coef",
                "algorithm.sft_coef",
                "algorithm.echo_coef",
                "actor.kl_loss_coef",
                "rollout.temperature",
                "rollout.val_kwargs.temperature",
                "data.target_score",
                "ray.cpus_per_worker",
            )
        ),
        ("actor.entropy_coeff=-inf", r"actor.entropy_coeff must be finite; got -inf"),
        ("data.train_batch_size=60", r"data\.train_batch_size must be divisible by actor\.ppo_mini_batch_size"),
        ("rollout.n=1", r"rollout\.n must be at least 2 with algorithm\.adv_estimator=grpo"),
        ("rollout.num_workers=1000", r"rollout\.num_workers must be at most data\.train_batch_size"),
        ("rollout=hf", r"rollout is a group of settings"),
        ("algorithm=grop", r"algorithm must be one of grpo, opd, opd_pg, ppo, sft; got 'grop'\. Did you mean 'grpo'\?"),
        (
            "algorithm=demo",
            r"algorithm must be one of grpo, opd, opd_pg, ppo, sft; got 'demo'\. preset=demo is a preset",
        ),
        ("preset=demo-pp", r"preset must be one of .*demo, .*, none; got 'demo-pp'\. Did you mean 'demo-ppo'\?"),
        ("algorithm.gamma=2", r"algorithm\.gamma must be in \[0, 1\]; got 2"),
        ("justaword", r"Not an override: 'justaword'; write key=value"),
        (
            "data.train_files=*.jsonl",
            r"data\.train_files can't be read as YAML: '\*\.jsonl'\. .*: 'data\.train_files=\"\*\.jsonl\"'$",
        ),
        ("transfer_queue.num_storage_units=0", r"transfer_queue\.num_storage_units"),
        ("checkpoint_engine.timeout_s=-1", r"checkpoint_engine\.timeout_s"),
        ("critic.optim.lr_decay_steps=3", r"^critic\.optim\.lr_decay_steps must be"),
        ("data.train_files=a,a", r"^data\.train_files must be different files"),
    ],
)
def test_wrong_overrides_name_key_and_remedy(override, message):
    with pytest.raises(ConfigError, match=message):
        load_config([override])


BOUNDED = [option for option in options() if option.spec.bounds]


@pytest.mark.parametrize("option", BOUNDED, ids=[option.key for option in BOUNDED])
def test_a_value_out_of_bounds_is_refused_with_the_whole_key(option):
    low = option.spec.gt if option.spec.ge is None else option.spec.ge
    wrong = "-inf" if low is None else int(low) - 1
    with pytest.raises(ConfigError) as caught:
        load_config([f"{option.key}={wrong}"])
    assert str(caught.value).startswith(f"{option.key} must be {option.spec.bounds}; got ")


CHOSEN = [option for option in options() if option.spec.choices]


@pytest.mark.parametrize("option", CHOSEN, ids=[option.key for option in CHOSEN])
def test_a_value_that_is_no_choice_is_refused_with_the_whole_key(option):
    with pytest.raises(ConfigError) as caught:
        load_config([f"{option.key}=zzz"])
    assert str(caught.value).startswith(f"{option.key} must be ")
    assert all(choice in str(caught.value) for choice in option.spec.choices)


def test_every_key_with_a_typo_is_refused_with_the_right_suggestion():
    keys = [option.key for option in options()]
    for key in keys:
        last = key.rpartition(".")[2]
        for wrong in (key + key[-1], key.removesuffix(last) + last[:1] + "_" + last[1:], key.replace(".", "..", 1)):
            if wrong == key:
                continue
            with pytest.raises(ConfigError) as caught:
                load_config([f"{wrong}=1"])
            assert f"Did you mean '{key}'?" in str(caught.value), wrong


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_plus_plus", "optimal_token_baseline", "remax"])
@pytest.mark.parametrize("loss", ["gspo", "cispo", "kl_cov", "dppo_tv"])
def test_estimator_and_loss_are_chosen_by_name(estimator, loss):
    config = load_config([f"algorithm.adv_estimator={estimator}", f"actor.policy_loss.loss_mode={loss}"])
    assert (config.algorithm.adv_estimator, config.actor.policy_loss.loss_mode) == (estimator, loss)
    assert from_yaml(to_yaml(config)) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.adv_estimator=rlo"], r"got 'rlo'\. Did you mean 'rloo'\?"),
        (["actor.policy_loss.loss_mode=gmpo"], r"got 'gmpo'\. Did you mean 'geo_mean'\?"),
        (["actor.policy_loss.loss_mode=geo_mean"], r"set actor\.loss_agg_mode=seq-mean-token-mean"),
        (["actor.kl_loss_type=full"], "logits of both policies"),
        (["algorithm.adv_estimator=gdpo"], r"algorithm\.gdpo_reward_keys"),
        (["algorithm.rollout_correction.rollout_is=tokn"], r"rollout_correction\.rollout_is must be"),
    ],
)
def test_algorithms_that_do_not_exist_or_do_not_fit_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides)


def test_two_bounds_are_not_read_as_one_number(tmp_path):
    """YAML 1.1 reads 0.5_2 as 0.52 and 1_2 as 12."""
    key, file = "algorithm.rollout_correction.rollout_is_threshold", tmp_path / "my.yaml"
    given = "algorithm.rollout_correction.rollout_is=token"
    file.write_text("algorithm: {rollout_correction: {rollout_is: token, rollout_is_threshold: 0.5_2}}\n")
    for config in (load_config([given, f"{key}=0.5_2"]), load_config([], file)):
        assert config.algorithm.rollout_correction.is_bounds() == Bounds(lower=0.5, upper=2.0)
        assert from_yaml(to_yaml(config)) == config
    assert load_config([given, f"{key}=3"]).algorithm.rollout_correction.is_bounds() == Bounds(lower=None, upper=3.0)


@pytest.mark.parametrize("text", ["007", "0209", "0101", "2026-02-09", "2026-02-30", "2026-02-09 12:30:00"])
def test_dates_and_digits_after_a_zero_are_read_as_text(text):
    assert load_config([f"trainer.run_name={text}"]).trainer.run_name == text


@pytest.mark.parametrize(
    "text", ["1e-05", "1e5", "12", "-3", ".5", "007", "0.5_2", "0x10", "off", "2026-02-09", "null"]
)
def test_a_text_that_reads_as_something_else_comes_back(text):
    config = load_config([f"trainer.run_name='{text}'"])
    assert config.trainer.run_name == text
    assert from_yaml(to_yaml(config)) == config
    assert flat_settings(shown_yaml(config))["trainer.run_name"] == text
    assert yaml.safe_load(to_yaml(config))["trainer"]["run_name"] == text


def test_an_integer_may_begin_with_zeros():
    assert load_config(["rollout.n=010"]).rollout.n == 10


@pytest.mark.parametrize("text", ["!!int x", "!!timestamp 2026-02-30", "{a: &a {b: *a}}"])
def test_a_value_that_yaml_cannot_construct_is_refused(text, tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(f"trainer: {{run_name: {text}}}\n")
    with pytest.raises(ConfigError, match=r"The value of trainer\.run_name can't be read as YAML"):
        load_config([f"trainer.run_name={text}"])
    with pytest.raises(ConfigError, match=r"my\.yaml: can't be read as YAML: .* line 1"):
        load_config([], file)


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "0.00001", "1.0e-05", ".00001", "+1e-5"])
def test_numbers_are_read_as_numbers(text):
    assert load_config([f"actor.optim.lr={text}"]).actor.optim.lr == 1e-5


def test_on_and_off_are_words_where_an_option_has_these_and_booleans_elsewhere(tmp_path):
    """YAML 1.1 reads both as booleans, so `off` was no value of transfer_queue.durability."""
    overrides = ["transfer_queue.durability=off", "actor.use_kl_loss=off", "trainer.val_before_train=on"]
    (tmp_path / "c.yaml").write_text("transfer_queue: {durability: off}\nactor: {use_kl_loss: off}\n")
    for config in (load_config(overrides), load_config([], tmp_path / "c.yaml")):
        assert config.transfer_queue.durability == "off"
        assert config.actor.use_kl_loss is False
        assert config.trainer.val_before_train is True


def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: can't be read"):
        load_config([], tmp_path / "nowhere.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match="expected a mapping"):
        load_config([], bad)


def test_help_lists_every_key_with_its_meaning():
    text = help_text()
    for option in options():
        assert option.key in text
        assert option.spec.help, f"{option.key} has no help text"
        assert with_full_keys(option.spec.help) in text


def test_flags():
    arguments = parse(["--cfg", "a=1", "--config", "f.yaml"])
    assert (arguments.flags.keys(), arguments.overrides) == ({"--cfg", "--config"}, ("a=1",))
    assert str(arguments.config_file) == "f.yaml"
    with pytest.raises(ConfigError, match="Unknown flag '--halp'"):
        parse(["--halp"])
    with pytest.raises(ConfigError, match=r"have no dashes: write rollout\.n=4 in place of --rollout\.n=4"):
        parse(["--rollout.n=4"])
    with pytest.raises(ConfigError, match="--config needs a file"):
        parse(["--config"])
    with pytest.raises(ConfigError, match="--diff needs two configurations"):
        parse(["--diff", "one"])


def test_cfg_prints_the_resolved_configuration(capsys):
    assert main(["--cfg", "rollout.n=4"]) == 0
    printed = flat_settings(capsys.readouterr().out)
    config = load_config(["rollout.n=4"])
    whole = flat_settings(to_yaml(config))
    left_out = whole.keys() - printed.keys()
    assert printed == {key: value for key, value in whole.items() if key not in left_out}
    assert "algorithm.lam" in left_out
    assert unused(config, left_out).keys() == left_out


def test_errors_are_one_paragraph_on_stderr_with_exit_code_2(capsys):
    assert main(["rolout.n=4"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: Unknown key 'rolout.n'.")


def test_data_files_and_their_shares():
    config = load_config(["data.train_files=0.7*a.jsonl, 0.3*b/c.parquet", "data.val_files=v.jsonl"]).data
    assert (config.files("train"), config.shares(), config.files("val")) == (
        ("a.jsonl", "b/c.parquet"),
        (0.7, 0.3),
        ("v.jsonl",),
    )
    assert load_config(["data.train_files=a.jsonl,b*.jsonl", "data.val_files=v.jsonl"]).data.shares() is None
    for train, val, message in (
        ("0.7*a.jsonl,b.jsonl", "v.jsonl", "all have a share, or none"),
        ("a.jsonl", "1*v.jsonl", r"data\.val_files must be files without shares"),
        ("a.jsonl,a.jsonl", "v.jsonl", "different files"),
        ("", "v.jsonl", r"data\.val_files must be empty if data\.train_files is"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config([f"data.train_files={train}", f"data.val_files={val}"])


LISTS = {
    "data.train_files": ("a.jsonl", "b.jsonl"),
    "trainer.logger": ("console", "wandb"),
    "trainer.profile_steps": (2, 5),
    "lora.target_modules": ("q_proj", "v_proj"),
}


@pytest.mark.parametrize("key", LISTS)
def test_a_list_is_given_as_a_list_or_with_commas(key, tmp_path):
    more = ["lora.rank=2"] if key.startswith("lora.") else []
    value = LISTS[key]
    texts = [f"[{','.join(map(str, value))}]", ",".join(map(str, value)), f"[ {', '.join(map(str, value))} ]"]
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump({key: list(value)}))
    found = [load_config([f"{key}={text}", *more]) for text in texts] + [load_config(more, file)]
    for config in found:
        assert functools.reduce(getattr, key.split("."), config) == value
        assert from_yaml(to_yaml(config)) == config
    assert resolve([f"{key}={texts[0]}"]).settings[key].value == value


def test_gdpo_weights_are_numbers():
    given = ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[score,acc]"]
    assert load_config([*given, "algorithm.gdpo_reward_weights=1,0.5"]).algorithm.component_weights == (1.0, 0.5)
    assert load_config(given).algorithm.component_weights == (1.0, 1.0)
    with pytest.raises(ConfigError, match=r"gdpo_reward_weights must be of type list of float; got 'a,b'"):
        load_config([*given, "algorithm.gdpo_reward_weights=a,b"])


def test_a_configuration_with_comma_separated_text_is_read():
    """Checkpoints have the configuration in the form of the version that wrote it."""
    text = to_yaml(load_config(["trainer.logger=[console,wandb]"]))
    old = text.replace("  logger:\n  - console\n  - wandb\n", "  logger: console,wandb\n")
    assert old != text
    assert from_yaml(old) == from_yaml(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rollout: {n: 4}\nactor: {}\nrollout: {response_length: 16}\n", "'rollout' is there twice.* line 3"),
        ("rollout: {n: 4, n: 5}\n", "'n' is there twice.* line 1, column 17"),
    ],
)
def test_a_key_that_a_file_has_twice_is_refused(tmp_path, text, problem):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"--config .*mine\.yaml: can't be read as YAML: the key {problem}"):
        load_config([], file)


def test_a_key_beside_a_merged_mapping_is_there_once(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "actor:\n  optim: &a {lr: 1e-3, beta1: 0.8}\ncritic:\n  optim: {<<: *a, lr: 1e-4}\nalgorithm: ppo\n"
    )
    critic = load_config([], file).critic.optim
    assert (critic.lr, critic.beta1) == (1e-4, 0.8)


def test_a_group_is_given_as_a_mapping():
    config = load_config(["actor.optim={lr: 1e-3, beta1: 0.8}", "actor={clip_ratio_low: 0.1}", "actor.optim.beta1=0.7"])
    assert (config.actor.optim.lr, config.actor.optim.beta1, config.actor.clip_ratio_low) == (1e-3, 0.7, 0.1)
    with pytest.raises(ConfigError, match=r"Unknown key 'actor\.optim\.lrr'\. Did you mean 'actor\.optim\.lr'"):
        load_config(["actor.optim={lrr: 1e-3}"])


@pytest.mark.parametrize(
    "text", ["hydra: {searchpath: [x]}\n", "defaults: [_self_]\n", "data: {return_raw_chat: true}\n"]
)
def test_a_file_of_verl_is_refused_with_the_command_that_converts_it(text, tmp_path):
    file = tmp_path / "verl.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="`rl import-verl` converts a file of verl"):
        load_config([], file)
    with pytest.raises(ConfigError, match=r"^Unknown key 'data\.return_raw_chat'.*rows are loaded\. `rl explain`"):
        load_config(["data.return_raw_chat=true"])


def test_a_setting_may_refer_to_another_whatever_sets_that_later():
    resolved = resolve(["data.seed=${trainer.seed}", "trainer.seed=7"])
    assert (resolved.config.data.seed, resolved.settings["data.seed"].value, resolved.changed["data.seed"]) == (7, 7, 7)


@pytest.mark.parametrize(
    ("words", "label"),
    [
        ([], "grpo"),
        (["algorithm=ppo"], "ppo"),
        (["algorithm.adv_estimator=gae"], "gae"),
        (["algorithm=opd", "reference.path=/teacher"], "opd"),
    ],
)
def test_a_run_is_named_after_what_it_does(words, label):
    assert algorithm_label(load_config(words)) == label


def test_an_adapter_of_the_critic_brings_its_options_and_lora(tmp_path):
    layers = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight" for side in "AB"]
    tensors = {name: np.zeros((2, 2), np.float32) for name in layers}
    head = {"base_model.model.score.weight": np.zeros((1, 2), np.float32)}
    save_file(tensors | head, tmp_path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "modules_to_save": ["classifier", "score"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    config = resolve(["algorithm=ppo", f"critic.adapter_path={tmp_path}"]).config
    assert (config.critic.use_lora, config.lora.rank, config.lora.target_modules) == (True, 2, ("q_proj",))
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields | {"modules_to_save": ["lm_head"]}))
    with pytest.raises(ConfigError, match=r"^critic\.adapter_path: .*modules_to_save is \['lm_head'\]"):
        resolve(["algorithm=ppo", f"critic.adapter_path={tmp_path}"])


def test_an_adapter_to_start_from_brings_its_options(tmp_path):
    layers = [
        f"base_model.model.model.layers.0.self_attn.{name}_proj.lora_{side}.weight" for name in "qv" for side in "AB"
    ]
    save_file({name: np.zeros((2, 2), np.float32) for name in layers}, tmp_path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_dora": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    resolved = resolve([f"lora.adapter_path={tmp_path}", "lora.alpha=8"])
    lora = resolved.config.lora
    assert (lora.rank, lora.use_dora, lora.target_modules) == (2, True, ("q_proj", "v_proj"))
    assert resolved.settings["lora.rank"].origin == f"lora.adapter_path={tmp_path}"
    assert (lora.alpha, resolved.settings["lora.alpha"].origin) == (8, "command line")  # refused before the start
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"^lora\.adapter_path: .*adapter_model\.safetensors is no readable"):
        resolve([f"lora.adapter_path={tmp_path}"])
