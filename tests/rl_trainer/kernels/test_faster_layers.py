"""Models of transformers with faster layers compute what they did before."""

from __future__ import annotations

import copy
import inspect
import sys

import pytest
import torch
from relative import apart
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

from rl_trainer.kernels import faster_layers
from rl_trainer.kernels.faster_layers import use_faster_layers

pytestmark = pytest.mark.numeric
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}, 5),
    "mistral": (MistralConfig, MistralForCausalLM, {}, 5),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}, 5),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}, 9),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "experts_implementation": "eager",
            "moe_intermediate_size": 16,
        },
        9,
    ),
    "granite": (GraniteConfig, GraniteForCausalLM, {}, 5),
    "phi3, a part of each head is rotated": (
        Phi3Config,
        Phi3ForCausalLM,
        {"partial_rotary_factor": 0.5, "pad_token_id": 0},
        5,
    ),
    "gemma2, whose norms add 1 to weights": (Gemma2Config, Gemma2ForCausalLM, {"head_dim": 8}, 0),
    "olmo, whose norms have no weights": (OlmoConfig, OlmoForCausalLM, {}, 0),
}
"""Configuration, model, settings besides SIZES, and how many norms are replaced."""
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def as_imported(monkeypatch):
    """transformers' modules as they are before `use_faster_layers`, during the test."""
    families = [module for name, module in sys.modules.items() if name.startswith("transformers.models.")]
    for family in families:
        if rotary := vars(family).get("apply_rotary_pos_emb"):
            monkeypatch.setattr(family, "apply_rotary_pos_emb", inspect.unwrap(rotary))


def made(family):
    config, model, more, _ = FAMILIES[family]
    torch.manual_seed(0)
    built = model(config(**SIZES, **more)).eval()
    for parameter in built.parameters():  # norms begin with weights of 1
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return built


def outputs(model, tokens):
    """Logits, and the gradients of all parameters."""
    model.zero_grad()
    logits = model(input_ids=tokens, use_cache=False).logits
    logits.logsumexp(-1).square().sum().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family):
    model, tokens = made(family), torch.randint(0, 40, (3, 9))
    exact = outputs(copy.deepcopy(model).double(), tokens)
    plain = outputs(model, tokens)
    use_faster_layers(model)
    faster = outputs(model, tokens)
    for truth, before, after in zip(exact, plain, faster, strict=True):
        assert apart(after.double(), truth) < 4 * apart(before.double(), truth) + 100 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("family", FAMILIES)
def test_which_layers_are_replaced(family):
    *_, norms = FAMILIES[family]
    model = made(family)
    kinds = [type(module) for module in model.modules()]
    use_faster_layers(model)
    replaced = [kind for kind, module in zip(kinds, model.modules(), strict=True) if type(module) is not kind]
    assert sum(kind.__name__.endswith("Norm") for kind in replaced) == norms
    assert all(isinstance(module, kind) for kind, module in zip(kinds, model.modules(), strict=True))
    assert [type(module).__name__ for module in model.modules()] == [kind.__name__ for kind in kinds]


def test_layers_elsewhere_than_on_the_cpu_are_computed_by_transformers(monkeypatch):
    model = made("qwen2")
    use_faster_layers(model)
    for name in ("rms_norm", "rotate"):
        monkeypatch.delattr(faster_layers, name)
    with torch.device("meta"):
        assert model.to("meta")(input_ids=torch.zeros(1, 3, dtype=torch.int64)).logits.shape == (1, 3, 40)


def test_a_second_time_changes_nothing():
    model = made("llama")
    use_faster_layers(model)
    kinds, rotary = [type(module) for module in model.modules()], modeling_llama.apply_rotary_pos_emb
    use_faster_layers(model)
    assert [type(module) for module in model.modules()] == kinds
    assert modeling_llama.apply_rotary_pos_emb is rotary


def test_rotary_embeddings_of_a_family_after_llamas():
    use_faster_layers(made("llama"))
    before = modeling_qwen2.apply_rotary_pos_emb
    use_faster_layers(made("qwen2"))
    assert modeling_qwen2.apply_rotary_pos_emb is not before
