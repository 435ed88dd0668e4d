"""Sizes of a model come from its configuration."""

from __future__ import annotations

from qwen3_fields import FIELDS

from rl_megatron_peft import ModelShape


def test_sizes_come_from_the_configuration():
    shape = ModelShape.of(FIELDS)
    assert (shape.rope_base, shape.qk_norm, shape.qkv_bias, shape.tied) == (1e6, True, False, False)
    assert shape.linear("q_proj") == (128, 64)
    assert shape.linear("v_proj") == (32, 64)
    assert shape.linear("o_proj") == (64, 128)
    assert ModelShape.of({**FIELDS, "head_dim": None}).head_dim == 8
    newer = {**FIELDS, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    assert ModelShape.of(newer).rope_base == 7.0
