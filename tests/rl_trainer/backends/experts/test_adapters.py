"""LoRA on experts equals peft's: fresh, trained, merged, saved and read again."""

from __future__ import annotations

from dataclasses import replace

import peft
import pytest
import torch
from relative import apart
from transformers import AutoModelForCausalLM

from rl_protocol import ConfigError
from rl_trainer import LoraConfig
from rl_trainer.backends.experts.adapters import adapted_experts
from rl_trainer.backends.loading import load_model
from rl_trainer.backends.peft_lora import MergedAdapter, adapter_weights, attach, merged_weights

pytestmark = pytest.mark.numeric

TARGETS = [("all-linear",), ("down_proj",), ("q_proj", "gate_proj", "up_proj")]
IDS = torch.arange(1, 13).reshape(2, 6)


def whole(items):
    return items


@pytest.fixture(params=TARGETS, ids="-".join)
def lora(request):
    return LoraConfig(rank=3, alpha=6, target_modules=request.param)


@pytest.fixture
def trained(moe_model, lora):
    """A model whose adapters are not zero."""
    model = attach(load_model(moe_model), lora, 3)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model


@torch.no_grad()
def test_fresh_adapters_change_nothing_and_those_that_are_off_neither(moe_model, lora, trained):
    base = load_model(moe_model)(IDS).logits
    assert apart(attach(load_model(moe_model), lora, 3)(IDS).logits, base) < 1e-4
    assert apart(trained(IDS).logits, base) > 1e-4
    with trained.disable_adapter():
        assert apart(trained(IDS).logits, base) < 1e-4


@torch.no_grad()
def test_merged_weights_are_those_of_peft_and_of_the_rollout(moe_model, lora, trained):
    want = trained(IDS).logits
    merged = dict(merged_weights(trained.state_dict(), lora, whole))
    plain = load_model(moe_model)
    plain.load_state_dict(merged)
    assert apart(plain(IDS).logits, want) < 1e-4
    sent = dict(adapter_weights(trained.state_dict(), whole))
    rollout = MergedAdapter(load_model(moe_model), lora)
    assert rollout.shapes() == {name: tuple(tensor.shape) for name, tensor in sent.items()}
    found = dict(rollout.weights(sent))
    assert found.keys() == rollout.merged
    assert all(torch.equal(weight, merged[name]) for name, weight in found.items())
    assert all(
        torch.equal(merged[name], weight)
        for name, weight in load_model(moe_model).state_dict().items()
        if name not in found
    )
    for name, weight in trained.merge_and_unload().state_dict().items():
        assert apart(weight, merged[name]) < 1e-5


@torch.no_grad()
def test_peft_reads_what_is_saved_with_equal_logits(moe_model, trained, tmp_path):
    want = trained(IDS).logits
    trained.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(moe_model), tmp_path).eval()
    assert apart(again(IDS).logits, want) < 1e-4


@torch.no_grad()
def test_training_starts_from_what_peft_has_saved(moe_model, lora, trained, tmp_path):
    want = trained(IDS).logits
    trained.save_pretrained(tmp_path)
    again = attach(load_model(moe_model), replace(lora, adapter_path=str(tmp_path)), 3)
    assert torch.equal(again(IDS).logits, want)
    with pytest.raises(ConfigError, match=r"LoraConfig\.rank must be 3"):
        attach(load_model(moe_model), replace(lora, adapter_path=str(tmp_path), rank=2), 3)


def test_every_factor_gets_a_gradient(trained):
    trained(IDS).logits.square().mean().backward()
    assert all(parameter.grad is not None for parameter in trained.parameters() if parameter.requires_grad)


def test_a_part_of_a_joined_weight_is_refused(moe_model):
    with pytest.raises(
        ConfigError, match=r"must take all of gate_proj, up_proj or none: .*experts\.gate_up_proj holds"
    ):
        attach(load_model(moe_model), LoraConfig(rank=3, target_modules=("q_proj", "up_proj")), 3)


def test_an_expert_layer_that_is_excluded_gets_none():
    shapes = [(f"layers.{i}.mlp.experts.{name}", (4, 6, 8)) for i in (0, 1) for name in ("gate_up_proj", "down_proj")]
    lora = LoraConfig(rank=2, exclude=("layers.0.mlp.experts.down_proj",))
    assert adapted_experts(shapes, lora) == {
        "layers.0.mlp.experts.gate_up_proj": "layers.0.mlp.experts",
        "layers.1.mlp.experts.gate_up_proj": "layers.1.mlp.experts.base_layer",
        "layers.1.mlp.experts.down_proj": "layers.1.mlp.experts",
    }
