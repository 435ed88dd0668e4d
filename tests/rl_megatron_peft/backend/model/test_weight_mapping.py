"""Loading base models: refused ones, models in several files, and the choice of a mapping."""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest

from rl_megatron_peft import (
    Layout,
    ModelShape,
    fingerprint,
)
from rl_protocol import ConfigError


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"\x08" + bytes(9)),
            "model.safetensors: file can't be read",
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), "no safetensors file"),
        (
            lambda folder: edit(folder, intermediate_size=96),
            r"mlp.gate_proj.weight has shape \(48, 32\); config.json makes it \(96, 32\)",
        ),
        (lambda folder: edit(folder, num_hidden_layers=3), r"model.layers.2.input_layernorm.weight is in none of its"),
        (
            lambda folder: edit(folder, model_type="gemma"),
            "model_type must be one of llama, qwen2, qwen3, qwen3_moe; got 'gemma'",
        ),
        (lambda folder: edit(folder, mlp_bias=True), "mlp_bias must be False; got True"),
        (lambda folder: edit(folder, hidden_size="32"), "hidden_size must be an integer >= 1; got '32'"),
        (
            lambda folder: edit(folder, rope_parameters={"rope_type": "yarn"}),
            "rope_parameters must be of type 'default'",
        ),
        (lambda folder: (folder / "config.json").write_text("{"), "can't be read as a model configuration"),
    ],
)
def test_a_base_model_that_can_not_be_loaded_is_named(ranks, models, program, tmp_path, damage, message):
    shutil.copytree(models / "llama", tmp_path / "m")
    damage(tmp_path / "m")
    with pytest.raises(ConfigError, match=message):
        program.policy_of(tmp_path / "m", ranks, "fused")


def edit(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_a_model_in_several_files_is_the_same_model(ranks, models, program, tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(models / "llama").save_pretrained(tmp_path / "m", max_shard_size="20KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    assert fingerprint(tmp_path / "m") == fingerprint(models / "llama")
    whole, parts = (program.policy_of(path, ranks, "fused") for path in (models / "llama", tmp_path / "m"))
    pairs = zip(whole.named_weights(), parts.named_weights(), strict=True)
    assert all((a.name, a.data.tobytes()) == (b.name, b.data.tobytes()) for a, b in pairs)
    assert [w.name for w in whole.named_weights()] == list(ModelShape.read(models / "llama").tensors())


def test_a_mapping_that_is_not_installed_is_refused_and_ours_takes_its_place(
    policy, ranks, models, program, monkeypatch
):

    from rl_megatron_peft.backend.model import megatron_bridge
    from rl_megatron_peft.backend.model.weight_mapping import OwnMapping, best_mapping

    assert isinstance(best_mapping(models / "llama", policy.shape, ranks), OwnMapping)
    with pytest.raises(
        ConfigError, match=r"not installed; install 'rl-megatron-peft\[bridge\]'; or use rl_megatron_peft"
    ):
        program.policy_of(models / "llama", ranks, "fused", mapping=megatron_bridge.BridgeMapping)
    spec = importlib.util.spec_from_loader("megatron.bridge", None)
    monkeypatch.setattr(megatron_bridge, "find_spec", {"megatron.bridge": spec, "transformer_engine": None}.get)
    for version, message in (
        ("0.3.9", "without Transformer Engine"),
        ("0.4.2", "0.4.2 is installed, supported are 0.3"),
    ):
        monkeypatch.setattr(megatron_bridge.metadata, "version", {"megatron-bridge": version}.get)
        assert message in megatron_bridge.bridge_problem(policy.shape, Layout())
