"""Adapters that a policy refuses to load, with file and field; the policy stays unchanged."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from rl_megatron_peft import (
    Adapter,
    AdapterError,
    LoraPair,
    write_adapter,
)
from rl_protocol import WeightTensor


def refused(program, policy, path, field, message):
    """Check that loading fails with this file and field and leaves the policy unchanged."""
    before = program.factors_of(policy)
    with pytest.raises(AdapterError, match=message) as caught:
        policy.load_adapter(path)
    assert caught.value.file.startswith(str(path))
    assert caught.value.field == field
    assert program.factors_of(policy) == before


def changed(adapter, **config):
    """Return the adapter with another configuration and factors that fit it."""

    new = dataclasses.replace(adapter.config, **config)

    def cut(weight: WeightTensor, axis: int) -> WeightTensor:
        array = weight.data.view("float32").reshape(weight.shape)
        array = array[: new.rank] if axis == 0 else array[:, : new.rank]
        return WeightTensor(weight.name, "float32", array.shape, array.copy().reshape(-1).view("uint8"))

    def long(b: WeightTensor) -> WeightTensor | None:
        return WeightTensor(b.name, "float32", b.shape[:1], b.data[: 4 * b.shape[0]]) if new.use_dora else None

    kept = {name: pair for name, pair in adapter.pairs.items() if new.covers(name)}
    pairs = {name: LoraPair(a=cut(p.a, 0), b=cut(p.b, 1), magnitude=long(p.b)) for name, p in kept.items()}
    return Adapter(base_model="x", config=new, pairs=pairs, fingerprint=adapter.fingerprint)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize(
    ("config", "field", "message"),
    [
        ({"rank": 2}, "rank", "the rank of model.layers.0.mlp.down_proj is 2, the model's is 3"),
        ({"alpha": 3.0}, "alpha", "the scale of model.layers.0.mlp.down_proj is 1.0, the model's is 2.0"),
        ({"use_dora": True}, "use_dora", "use_dora is True, the model's is False"),
        ({"target_modules": ATTENTION}, "model.layers.0.mlp.down_proj", "missing .*model.layers.1.mlp.up_proj"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(program, policy, tmp_path, config, field, message):
    write_adapter(tmp_path / "a", changed(policy.adapter(), **config))
    refused(program, policy, tmp_path / "a", field, message)


def test_an_adapter_of_another_base_model_is_refused(policy, ranks, models, program, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(models / "llama", other)
    raw = bytearray((other / "model.safetensors").read_bytes())
    raw[-2] ^= 64
    (other / "model.safetensors").write_bytes(raw)
    program.policy_of(other, ranks, "fused").save_pretrained(tmp_path / "a")
    refused(program, policy, tmp_path / "a", "base_model_fingerprint", "they must be equal")


def test_a_truncated_adapter_is_refused(program, policy, tmp_path):
    policy.save_pretrained(tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    refused(
        program, policy, tmp_path / "a", "file", "adapter_model.safetensors: file does not match adapter_manifest.json"
    )
    (tmp_path / "a" / "adapter_manifest.json").unlink()
    refused(program, policy, tmp_path / "a", "header", "adapter_model.safetensors: header is not a safetensors header")


def test_fused_adapters_refuse_different_a_per_module(policy, ranks, models, program, tmp_path):
    own = program.policy_of(models / "llama", ranks, "fused", fused=False)
    own.save_pretrained(tmp_path / "a")
    refused(program, policy, tmp_path / "a", "model.layers.0.mlp.up_proj.lora_A", "attach with fused=False")
    policy.save_pretrained(tmp_path / "b")  # the shared A loads as separate ones
    own.load_adapter(tmp_path / "b")
    assert {name: pair.a.data.tobytes() for name, pair in own.adapter().pairs.items()} == {
        name: pair.a.data.tobytes() for name, pair in policy.adapter().pairs.items()
    }


def test_a_stage_refuses_different_a_in_a_layer_of_another_stage(policy):
    from rl_megatron_peft.backend.lora.gather_adapter import scatter_adapter

    whole, name = policy.adapter(), "model.layers.1.mlp.up_proj"
    pair = whole.pairs[name]
    other = dataclasses.replace(pair, a=dataclasses.replace(pair.a, data=pair.a.data ^ 1))
    adapter = dataclasses.replace(whole, pairs={**whole.pairs, name: other})
    first_stage = [layer for layer in policy.adapters if layer.spec.module.layer == 0]
    with pytest.raises(AdapterError, match=r"up_proj\.lora_A differ, but fused adapters share one A"):
        scatter_adapter(adapter, first_stage, policy.lora, policy.shape, policy.ranks, fused=True)
