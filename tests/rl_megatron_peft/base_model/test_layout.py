"""The rank of tensors and optimizer state under a layout."""

from __future__ import annotations

import pytest
from qwen3_fields import FIELDS

from rl_megatron_peft import Layout, ModelShape
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
        hf_tensors("decoder.layers.0.mlp.router.weight")


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
