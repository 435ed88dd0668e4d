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
        ({"target_modules": ("o_proj", "layers.7.mlp.up_proj")}, r"names 'layers\.7\.mlp\.up_proj', which no layer"),
        (
            {
                "target_modules": ("layers.0.self_attn.o_proj", "layers.1.mlp.down_proj"),
                "exclude": ("1.mlp.down_proj",),
            },
            r"names 'layers\.1\.mlp\.down_proj', which no layer with adapters has",
        ),
    ],
)
def test_adapters_that_can_not_be_attached_are_refused(ranks, models, program, config, message):
    with pytest.raises(ConfigError, match=message):
        program.policy_of(models / "llama", ranks, "fused", lora=LoraConfig(rank=2, **config))


@pytest.mark.parametrize(
    ("config", "field", "message"),
    [
        ({"dropout": 0.1}, "dropout", r"must be 0.0 with adapters of experts, .* got 0\.1"),
        ({"use_dora": True}, "use_dora", r"must be False with adapters of experts"),
        ({"exclude": ("mlp.experts.up_proj",)}, "target_modules", r"all of gate_proj, up_proj of experts or none"),
        ({"target_modules": ("layers.2.mlp.experts.down_proj",)}, "target_modules", "is no module of this model"),
        ({"target_modules": ("mlp.down_proj",)}, "target_modules", "is no module of this model"),
        ({"target_modules": ("o_proj", "mlp.down_proj")}, "target_modules", r"names 'mlp\.down_proj', which no layer"),
    ],
)
def test_adapters_of_experts_that_can_not_be_attached_are_refused(ranks, moe_model, program, config, field, message):
    with pytest.raises(ConfigError, match=message) as caught:
        program.policy_of(moe_model, ranks, "canonical", lora=LoraConfig(rank=2, **config))
    assert caught.value.field == field


def test_each_expert_has_adapters_whose_gate_and_up_share_a(ranks, moe_model, program):
    lora = LoraConfig(rank=2, target_modules=("o_proj", "1.mlp.experts.gate_proj", "1.mlp.experts.up_proj"))
    policy = program.policy_of(moe_model, ranks, "canonical", lora=lora)
    experts = [f"model.layers.1.mlp.experts.{number}" for number in range(4)]
    fused = [f"decoder.layers.1.mlp.experts.local_experts.{number}.linear_fc1.lora_A" for number in range(4)]
    assert {factor.key for adapter in policy.adapters for factor in adapter.factors()} == {
        *(f"model.layers.{layer}.self_attn.o_proj.lora_{side}" for layer in (0, 1) for side in "AB"),
        *fused,
        *(f"{name}.{part}.lora_B" for name in experts for part in ("gate_proj", "up_proj")),
    }
    first = [adapter.a["linear_fc1"] for adapter in policy.adapters if adapter.spec.of_expert]
    assert len({tuple(a.flatten().tolist()) for a in first}) == 4  # each starts from its own A


def test_excluded_modules_have_no_adapter(ranks, models, program):
    lora = LoraConfig(rank=2, exclude=("layers.0.mlp.up_proj", "layers.1.self_attn.o_proj"))
    policy = program.policy_of(models / "llama", ranks, "fused", lora=lora, fused=False)
    policy.update(program.batch_of(4, 0), temperature=1.0)
    assert len(policy.adapter().pairs) == 12
    assert "model.layers.0.mlp.up_proj" not in policy.adapter().pairs


@pytest.mark.filterwarnings("ignore:You have passed exclude_modules")  # peft names modules only, no parameters
def test_an_adapter_without_the_experts_can_be_saved_for_peft(ranks, moe_model, program, tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    exclude = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")
    policy = program.policy_of(moe_model, ranks, "canonical", lora=LoraConfig(rank=2, exclude=exclude))
    policy.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(moe_model), tmp_path / "adapter")
    assert sum(name.endswith("lora_A.default.weight") for name, _ in loaded.named_parameters()) == 8
