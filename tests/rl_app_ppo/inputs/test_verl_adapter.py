"""Adapters in verl's old format are checked before a process starts, without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from verl_adapters import RANK, legacy_files

from rl_app_ppo.config.loading import load_config
from rl_app_ppo.inputs.verl_adapter import check_verl_adapter
from rl_megatron_peft import ModelShape
from rl_protocol import ConfigError


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with the config.json of a Qwen2 of two layers."""
    fields = {"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    fields |= {"num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 16, "max_position_embeddings": 64}
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(fields))
    return tmp_path / "base"


@pytest.fixture
def old(base: Path, tmp_path: Path) -> Path:
    """The adapter that verl wrote on two tensor and two pipeline ranks."""
    return legacy_files(tmp_path / "old", ModelShape.read(base), tensor=2, pipeline=2)


@pytest.mark.parametrize("inside", ["", "adapter_checkpoint"])
def test_it_brings_its_rank_and_modules_and_takes_the_alpha_that_is_set(old: Path, base: Path, inside: str):
    config = load_config([f"lora.adapter_path={old / inside}", "lora.alpha=6"])
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert (config.lora.rank, config.lora.alpha, config.lora.target_modules) == (RANK, 6.0, every)
    check_verl_adapter(config, base)


def test_alpha_may_come_from_a_file_but_not_from_the_default(old: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^lora\.alpha must be set with lora\.adapter_path=.*store no alpha"):
        load_config([f"lora.adapter_path={old}"])
    (tmp_path / "mine.yaml").write_text("lora: {alpha: 5}\n")
    assert load_config([f"lora.adapter_path={old}"], tmp_path / "mine.yaml").lora.alpha == 5.0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("lora.rank=8", r"lora\.rank must be 4, as in lora\.adapter_path=.*; got 8"),
        ("lora.target_modules=[q_proj]", r"lora\.target_modules must be \['down_proj', .*; got \['q_proj'\]"),
        ("lora.exclude=[layers.0.mlp.up_proj]", r"lora\.exclude must be \[\]"),
        ("lora.use_dora=true", r"lora\.use_dora must be False, .*; got True"),
        ("lora.use_rslora=true", r"lora\.use_rslora must be False, .*; got True"),
    ],
)
def test_an_option_that_differs_from_the_files_is_named(old: Path, base: Path, override: str, words: str):
    with pytest.raises(ConfigError, match=words):
        check_verl_adapter(load_config([f"lora.adapter_path={old}", "lora.alpha=6", override]), base)


def test_its_base_must_be_given_and_be_one_that_can_be_converted(old: Path, base: Path):
    config = load_config([f"lora.adapter_path={old}", "lora.alpha=6"])
    with pytest.raises(ConfigError, match=r"names? no base model; set model\.path"):
        check_verl_adapter(config, None)
    (base / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ConfigError, match=r"can't be converted for model\.path=.*model_type must be one of"):
        check_verl_adapter(config, base)


def test_damaged_files_and_a_missing_package_are_named(old: Path, monkeypatch: pytest.MonkeyPatch):
    words = [f"lora.adapter_path={old}", "lora.alpha=6"]
    (old / "adapter_checkpoint" / "mp_rank_01_001_adapter.pt").unlink()
    with pytest.raises(ConfigError, match=r"lora\.adapter_path=.*lacks the file of tensor rank 1, pipeline stage 1"):
        load_config(words)
    monkeypatch.setattr("rl_app_ppo.config.model_path.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rl-megatron-peft converts; .*uv pip install 'rl-app-ppo\[megatron\]'"):
        load_config(words)


def test_a_critic_takes_none(old: Path):
    with pytest.raises(ConfigError, match=r"^critic\.adapter_path=.*must be a PEFT folder"):
        load_config(["algorithm=ppo", f"critic.adapter_path={old}"])
