"""Names map one-to-one, and the interleaving of linear_qkv equals that of a plain loop."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rl_megatron_peft
from rl_megatron_peft import (
    FUSED,
    TARGETS,
    HFModule,
    MegatronModule,
    fused_targets,
    hf_parameter,
    megatron_parameter,
    qkv_rows,
)
from rl_protocol import ConfigError

LAYERS = st.integers(0, 999_999)
LEAVES = st.sampled_from(["weight", "bias"])


@pytest.mark.parametrize(
    ("hf", "megatron", "part"),
    [
        ("model.layers.0.self_attn.q_proj", "decoder.layers.0.self_attention.linear_qkv", 0),
        ("model.layers.0.self_attn.k_proj", "decoder.layers.0.self_attention.linear_qkv", 1),
        ("model.layers.0.self_attn.v_proj", "decoder.layers.0.self_attention.linear_qkv", 2),
        ("model.layers.7.self_attn.o_proj", "decoder.layers.7.self_attention.linear_proj", 0),
        ("model.layers.12.mlp.gate_proj", "decoder.layers.12.mlp.linear_fc1", 0),
        ("model.layers.12.mlp.up_proj", "decoder.layers.12.mlp.linear_fc1", 1),
        ("model.layers.12.mlp.down_proj", "decoder.layers.12.mlp.linear_fc2", 0),
    ],
)
def test_the_table_written_out(hf: str, megatron: str, part: int):
    module = HFModule.parse(hf)
    assert (module.name, module.megatron.name, module.part) == (hf, megatron, part)
    assert MegatronModule.parse(megatron).parts[part] == module
    assert megatron_parameter(f"{hf}.weight") == (f"{megatron}.weight", part)
    assert hf_parameter(f"{megatron}.bias")[part] == f"{hf}.bias"


@given(LAYERS, st.sampled_from(TARGETS), LEAVES)
def test_hugging_face_to_megatron_and_back(layer: int, logical: str, leaf: str):
    name = f"{HFModule(layer, logical).name}.{leaf}"
    megatron, part = megatron_parameter(name)
    assert hf_parameter(megatron)[part] == name
    assert HFModule.parse(HFModule(layer, logical).name) == HFModule(layer, logical)


@given(LAYERS, st.sampled_from(sorted(FUSED)), LEAVES)
def test_megatron_to_hugging_face_and_back(layer: int, fused: str, leaf: str):
    name = f"{MegatronModule(layer, fused).name}.{leaf}"
    assert [megatron_parameter(hf) for hf in hf_parameter(name)] == [(name, i) for i in range(len(FUSED[fused]))]


def test_every_target_is_in_one_fused_module():
    assert sorted(name for parts in FUSED.values() for name in parts) == sorted(TARGETS)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "q_proj",
        "model.layers.0.mlp.q_proj",
        "model.layers.0.self_attn.up_proj",
        "model.layers.x.self_attn.q_proj",
        "model.layers.01.self_attn.q_proj",
        "model.layers.1234567.self_attn.q_proj",
        "model.layers.0.self_attn.q_proj.weight",
        "decoder.layers.0.self_attention.linear_qkv",
        "xmodel.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.q_proj\n",
    ],
)
def test_other_names_are_refused(name: str):
    with pytest.raises(ConfigError, match="not a LoRA target of a Hugging Face model"):
        HFModule.parse(name)


def test_errors_suggest():
    with pytest.raises(ConfigError, match=r"Did you mean 'linear_qkv'\?"):
        MegatronModule.parse("decoder.layers.0.self_attention.linear_qvk")
    with pytest.raises(ConfigError, match=r"Did you mean 'k_proj'\?"):
        HFModule(0, "k_prj")
    with pytest.raises(ConfigError, match="layer of q_proj must be >= 0; got -1"):
        HFModule(-1, "q_proj")
    with pytest.raises(ConfigError, match=r"q_proj belongs to no expert; got expert=3"):
        HFModule(0, "q_proj", 3)
    with pytest.raises(ConfigError, match=r"linear_fc1 must be >= 0; got expert=-1"):
        MegatronModule(0, "linear_fc1", -1)
    with pytest.raises(ConfigError, match="last part must be 'weight' or 'bias'"):
        megatron_parameter("model.layers.0.self_attn.q_proj")


def test_fused_targets():
    assert fused_targets(TARGETS) == tuple(FUSED)
    assert fused_targets(["down_proj"]) == ("linear_fc2",)
    assert fused_targets([]) == ()
    with pytest.raises(ConfigError, match="missing k_proj"):
        fused_targets(["q_proj", "v_proj"])
    with pytest.raises(ConfigError, match="'up_prj' is not a LoRA target"):
        fused_targets(["up_prj"])


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_qkv_rows_are_those_of_a_loop(groups: int, per_group: int, head_dim: int):
    fused: list[tuple[str, int]] = []
    for group in range(groups):
        fused += [
            ("q", head * head_dim + d)
            for head in range(group * per_group, (group + 1) * per_group)
            for d in range(head_dim)
        ]
        fused += [("k", group * head_dim + d) for d in range(head_dim)]
        fused += [("v", group * head_dim + d) for d in range(head_dim)]
    parts = qkv_rows(groups * per_group, groups, head_dim)
    for name, rows in zip("qkv", parts, strict=True):
        assert [fused[row] for row in rows] == [(name, i) for i in range(len(rows))]
    assert sorted(row for rows in parts for row in rows) == list(range(len(fused)))


@pytest.mark.parametrize("numbers", [(0, 1, 1), (4, 0, 1), (4, 3, 1), (4, 2, 0)])
def test_qkv_rows_refuses_what_does_not_divide(numbers: tuple[int, int, int]):
    with pytest.raises(ConfigError, match="positive multiple"):
        qkv_rows(*numbers)


@pytest.mark.parametrize("module", ["base_model.naming", "peft.lora_config", "base_model.layout"])
def test_doctests(module: str):
    result = doctest.testmod(importlib.import_module(f"rl_megatron_peft.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_import_is_light_and_all_is_true():
    code = "import sys, rl_megatron_peft; print({'torch', 'megatron', 'peft', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    assert all(hasattr(rl_megatron_peft, name) for name in rl_megatron_peft.__all__)
