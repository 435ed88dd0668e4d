"""Sizes of a model come from its configuration."""

from __future__ import annotations

import pytest
from qwen3_fields import FIELDS

from rl_megatron_peft import ModelShape
from rl_protocol import ConfigError


def test_sizes_come_from_the_configuration():
    shape = ModelShape.of(FIELDS)
    assert (shape.rope_base, shape.qk_norm, shape.qkv_bias, shape.tied) == (1e6, True, False, False)
    assert shape.linear("q_proj") == (128, 64)
    assert shape.linear("v_proj") == (32, 64)
    assert shape.linear("o_proj") == (64, 128)
    assert ModelShape.of({**FIELDS, "head_dim": None}).head_dim == 8
    newer = {**FIELDS, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    assert ModelShape.of(newer).rope_base == 7.0


def test_sizes_of_experts_are_read_as_transformers_4_and_5_name_them():
    sparse = {**FIELDS, "model_type": "qwen3_moe", "moe_intermediate_size": 24, "num_experts_per_tok": 2}
    for name in ("num_experts", "num_local_experts"):
        shape = ModelShape.of({**sparse, name: 8})
        assert (shape.experts, shape.experts_per_token, shape.ffn, shape.qk_norm) == (8, 2, 24, True)
        assert not shape.top_k_normalized
        assert shape.tensors()["model.layers.0.mlp.gate.weight"] == (8, 64)
        assert shape.tensors()["model.layers.3.mlp.experts.7.down_proj.weight"] == (64, 24)
    assert ModelShape.of({**sparse, "num_experts": 8, "norm_topk_prob": True}).top_k_normalized
    assert (ModelShape.of(FIELDS).experts, ModelShape.of(FIELDS).top_k_normalized) == (0, True)
    for field, value, message in (
        ("num_experts_per_tok", 9, "num_experts_per_tok must be at most num_experts=8; got 9"),
        ("mlp_only_layers", [1], r"mlp_only_layers must be \[\]; got \[1\]"),
        ("decoder_sparse_step", 2, "decoder_sparse_step must be 1; got 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            ModelShape.of({**sparse, "num_experts": 8, field: value})
