"""The parts of a fused layer that an adapter covers, and how its factors are named and split."""

from __future__ import annotations

import pytest

from rl_megatron_peft import Layout, LoraConfig, MegatronModule, ModelShape

SHAPE = ModelShape.of(
    {
        "model_type": "llama",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "vocab_size": 16,
        "max_position_embeddings": 64,
    }
)


def spec_of(fused_module, config, layout=None, *, fused=True):
    from rl_megatron_peft.backend.lora.adapter_spec import AdapterSpec

    return AdapterSpec.of(MegatronModule(1, fused_module), config, SHAPE, layout or Layout(), fused=fused)


def test_fused_adapters_share_one_a_named_for_the_fused_module():
    spec = spec_of("linear_qkv", LoraConfig(rank=3), Layout(tensor=2, sequence_parallel=True))
    assert spec.a_ranks == {"linear_qkv": 3}
    assert spec.a_name(spec.a_key("k_proj")) == "decoder.layers.1.self_attention.linear_qkv.lora_A"
    assert spec.b_name("k_proj") == "model.layers.1.self_attn.k_proj.lora_B"
    assert spec.rows == {"q_proj": 16, "k_proj": 8, "v_proj": 8}  # the rows of one of two ranks
    assert (spec.columns, spec.a_split, spec.out_split, spec.sequence_parallel) == (32, None, 0, True)


def test_canonical_adapters_cover_targets_only_each_with_its_rank_and_scale():
    config = LoraConfig(rank=4, alpha=8, rank_pattern={"v_proj": 2}, target_modules=("q_proj", "v_proj"))
    spec = spec_of("linear_qkv", config, fused=False)
    assert spec.a_ranks == spec.ranks == {"q_proj": 4, "v_proj": 2}
    assert (spec.scaling["q_proj"], spec.scaling["v_proj"]) == (2.0, 4.0)
    assert spec.a_name(spec.a_key("v_proj")) == "model.layers.1.self_attn.v_proj.lora_A"
    assert spec.magnitude_name("v_proj") == "model.layers.1.self_attn.v_proj.lora_magnitude_vector"


@pytest.mark.parametrize(
    ("module", "logical", "columns"), [("linear_proj", "o_proj", 32), ("linear_fc2", "down_proj", 48)]
)
def test_row_parallel_layers_split_a_and_not_b(module, logical, columns):
    spec = spec_of(module, LoraConfig(rank=3), Layout(tensor=2))
    assert (spec.a_split, spec.out_split) == (1, None)
    assert spec.a_ranks == {logical: 3}  # a single logical module needs no shared A
    assert (spec.rows, spec.columns) == ({logical: 32}, columns)
