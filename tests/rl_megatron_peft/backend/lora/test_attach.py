"""Which modules get adapters."""

from __future__ import annotations

import pytest

from rl_megatron_peft import (
    LoraConfig,
)
from rl_protocol import ConfigError


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"target_modules": ("q_proj", "v_proj")},
            r"layers.0.self_attn.k_proj is not a target. Make it one, or set fused=False",
        ),
        ({"exclude": ("layers.1.mlp.up_proj",)}, "model.layers.1.mlp.up_proj is not a target"),
    ],
)
def test_adapters_that_can_not_be_attached_are_refused(ranks, models, program, config, message):
    with pytest.raises(ConfigError, match=message):
        program.policy_of(models / "llama", ranks, "fused", lora=LoraConfig(rank=2, **config))


def test_excluded_modules_have_no_adapter(ranks, models, program):
    lora = LoraConfig(rank=2, exclude=("layers.0.mlp.up_proj", "layers.1.self_attn.o_proj"))
    policy = program.policy_of(models / "llama", ranks, "fused", lora=lora, fused=False)
    policy.update(program.batch_of(4, 0), temperature=1.0)
    assert len(policy.adapter().pairs) == 12
    assert "model.layers.0.mlp.up_proj" not in policy.adapter().pairs
