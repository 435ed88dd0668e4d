"""The rank of tensors and optimizer state under a layout."""

from __future__ import annotations

import pytest
from qwen3_fields import FIELDS

from rl_megatron_peft import Layout, ModelShape
from rl_megatron_peft.base_model.experts import expert_of
from rl_megatron_peft.base_model.layout import global_name, hf_tensors, state_owners
from rl_protocol import ConfigError


def test_every_tensor_is_held_once_over_the_stages():
    for family in ("llama", "qwen2", "qwen3"):
        shape = ModelShape.of({**FIELDS, "model_type": family})
        parameters = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"]
        inside = ["input_layernorm.weight", "pre_mlp_layernorm.weight"]
        inside += [f"self_attention.{name}.weight" for name in ("linear_qkv", "linear_proj")]
        inside += ["mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
        inside += ["self_attention.linear_qkv.bias"] if shape.qkv_bias else []
        inside += [f"self_attention.{x}_layernorm.weight" for x in "qk"] if shape.qk_norm else []
        parameters += [f"decoder.layers.{layer}.{name}" for layer in range(4) for name in inside]
        held = [tensor.name for parameter in parameters for tensor in hf_tensors(parameter)]
        assert sorted(held) == sorted(shape.tensors())
        layout = Layout(pipeline=2)
        assert [layout.stage(f"model.layers.{i}.mlp.up_proj.weight", shape) for i in range(4)] == [0, 0, 1, 1]
        assert [layout.stage(name, shape) for name in ("model.embed_tokens.weight", "model.norm.weight")] == [0, 1]
    assert global_name("embedding.word_embeddings.weight", 3) == "embedding.word_embeddings.weight"
    with pytest.raises(ConfigError, match="not a LoRA target"):
        hf_tensors("decoder.layers.0.mlp.shared_experts.weight")


SPARSE = {**FIELDS, "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def test_every_expert_is_held_once_over_stages_and_expert_parallel_ranks():
    shape = ModelShape.of(SPARSE)
    layout = Layout(pipeline=2, expert=3)
    layout.check(shape)
    held = []
    for stage in range(2):
        for rank in range(3):
            local = ["router.weight"] if rank == 0 else []
            local += [f"experts.local_experts.{i}.linear_fc{x}.weight" for i in range(2) for x in (1, 2)]
            for parameter in (f"decoder.layers.{layer}.mlp.{name}" for layer in range(2) for name in local):
                tensors = hf_tensors(global_name(parameter, 2 * stage, 2 * rank))
                held += [tensor.name for tensor in tensors]
                assert all(layout.stage(tensor.name, shape) == stage for tensor in tensors)
                experts = {expert_of(tensor.name) for tensor in tensors} - {None}
                assert all(layout.expert_rank(expert, shape) == rank for expert in experts)
                splits = {"router": None, "linear_fc1": 0, "linear_fc2": 1}
                assert {tensor.split for tensor in tensors} == {splits[parameter.split(".")[-2]]}
    assert sorted(held) == sorted(name for name in shape.tensors() if ".mlp." in name)
    assert len(held) == 4 * (1 + 6 * 3)


def test_experts_that_ranks_can_not_divide_are_refused():
    shape = ModelShape.of(SPARSE)
    with pytest.raises(ConfigError, match="experts=6 can't be divided over expert=4 ranks"):
        Layout(expert=4).check(shape)
    with pytest.raises(ConfigError, match="experts=0 can't be divided over expert=2 ranks"):
        Layout(expert=2).check(ModelShape.of(FIELDS))
    with pytest.raises(ConfigError, match="experts needs sequence_parallel=True with tensor=2"):
        Layout(tensor=2).check(shape)
    Layout(tensor=2, sequence_parallel=True).check(shape)


def test_state_is_shared_by_size_and_nothing_is_divided():
    assert state_owners([4, 1, 7, 2, 2], 2) == (1, 0, 0, 1, 1)  # 7 + 1 | 4 + 2 + 2
    assert state_owners([3, 3], 4) == (0, 1)
    assert state_owners([], 2) == ()
    assert state_owners([5, 6, 7], 1) == (0, 0, 0)


def test_layouts_that_do_not_divide_are_refused():
    shape = ModelShape.of(FIELDS)
    assert Layout(tensor=2).padded_vocab(shape) == 102
    with pytest.raises(ConfigError, match="groups=2 can't be divided over tensor=4 ranks"):
        Layout(tensor=4).check(shape)
    with pytest.raises(ConfigError, match="4 layers can't be divided over pipeline=3 stages"):
        Layout(pipeline=3).check(shape)
    with pytest.raises(ConfigError, match="tensor must be at least 1; got 0"):
        Layout(tensor=0)
    with pytest.raises(ConfigError, match=r"got tensor=1\. Set tensor to 2"):
        Layout(pipeline=2, sequence_parallel=True)
