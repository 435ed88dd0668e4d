"""Adapters in PEFT folders: settings that vLLM would ignore are refused if they matter."""

from __future__ import annotations

import json

import numpy as np
import peft
import pytest
from safetensors.numpy import save_file

from rl_protocol import ConfigError, WeightSyncError
from rl_rollout_vllm import AdapterConfig
from rl_rollout_vllm.weights.adapters import read_adapter

ROOM = AdapterConfig(rank=8, alpha=16, target_modules=("q_proj",))


@pytest.fixture
def folder(tmp_path):
    """write(settings of peft, **fields of the file) -> a folder with an adapter of rank 4."""

    def write(settings=None, **fields):
        peft.LoraConfig(r=4, lora_alpha=10, target_modules=["q_proj"], **(settings or {})).save_pretrained(tmp_path)
        file = tmp_path / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
        tensors = {name.format("A"): np.ones((4, 6), np.float32), name.format("B"): np.ones((8, 4), np.float32)}
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        return tmp_path

    return write


@pytest.mark.parametrize(
    "settings", [{}, {"use_rslora": True}, {"init_lora_weights": "gaussian"}, {"lora_dropout": 0.1}]
)
def test_what_vllm_is_given_is_what_it_reads(folder, settings):
    adapter = read_adapter(folder(settings), ROOM)
    rooted = {"use_rslora": bool(settings.get("use_rslora"))}
    assert adapter.config == {"r": 4, "lora_alpha": 10, "target_modules": ["q_proj"]} | rooted
    assert [weight.shape for weight in adapter.weights] == [(4, 6), (8, 4)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa': .*path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"alora_invocation_tokens": [1, 2], "task_type": "CAUSAL_LM"}, "alora_invocation_tokens is"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern is"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    ],
)
def test_settings_that_vllm_would_ignore_are_refused(folder, settings, message):
    with pytest.raises(WeightSyncError, match=message):
        read_adapter(folder(settings), ROOM)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3'; vLLM supports adapters of peft_type='LORA'"),
        ({"field_of_a_later_peft": 3}, "field_of_a_later_peft is 3"),
        ({"r": 8}, "tensors of rank 4 and r=8"),
    ],
)
def test_files_that_do_not_say_what_the_adapter_is_are_refused(folder, fields, message):
    with pytest.raises(WeightSyncError, match=message):
        read_adapter(folder(**fields), ROOM)


def test_a_pickled_adapter_is_refused_with_the_way_to_convert_it(folder):
    path = folder()
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model\.bin is a pickle.*save_pretrained\(new_folder\)"):
        read_adapter(path, ROOM)


def test_a_truncated_adapter_is_named(folder):
    file = folder() / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors is truncated or damaged: .*lora_B"):
        read_adapter(file.parent, ROOM)
