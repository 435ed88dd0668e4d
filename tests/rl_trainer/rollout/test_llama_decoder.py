"""Decoding with few operations against the model's own forward pass."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rl_trainer.rollout.kv_cache import new_cache
from rl_trainer.rollout.llama_decoder import decodes, next_logits

pytestmark = pytest.mark.numeric

SMALL = {
    "vocab_size": 14,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "plain": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "biases": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True)),
    "scaled positions": lambda: LlamaForCausalLM(
        LlamaConfig(**SMALL, rope_parameters=SCALED | {"original_max_position_embeddings": 4})
    ),
    "another activation": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, hidden_act="gelu")),
    "one key per query": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL | {"num_key_value_heads": 4})),
    "norms of queries and keys": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16)),
}
IDS = torch.tensor([[0, 0, 5, 6, 7, 8], [3, 4, 5, 6, 9, 10], [0, 11, 12, 13, 3, 4]])
"""Three rows: four places of a prompt, some of them padding, and two tokens."""
PADDING = torch.tensor([2, 0, 1])


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    made = MODELS[request.param]().eval()
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)  # biases and norms, too, are not what they begin as
    return made


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("dtype", "rel"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_logits_are_those_of_the_whole_sequence(model, padded, dtype, rel):
    model = model.to(dtype)
    present = (torch.arange(6) >= PADDING[:, None]).long() if padded else torch.ones_like(IDS)
    places = (present.cumsum(-1) - 1).clamp(min=0)
    cache = new_cache(model.config, 6)
    assert decodes(model, cache)
    with torch.inference_mode():
        whole = model(input_ids=IDS, attention_mask=present, position_ids=places, use_cache=False).logits
        prompt = {"attention_mask": present[:, :4], "position_ids": places[:, :4]}
        model(input_ids=IDS[:, :4], past_key_values=cache, use_cache=True, **prompt)
        cache.reorder_cache(torch.arange(3))
        added = torch.zeros((3, 1, 1, 6), dtype=dtype).masked_fill_(present[:, None, None] == 0, -math.inf)
        for place in (4, 5):
            mask = added[..., : place + 1] if padded else None
            made = next_logits(model, cache, IDS[:, place, None], places[:, place, None], mask)
            wanted = whole[:, place]
            assert (made - wanted).norm() <= rel * wanted.norm()


@pytest.mark.parametrize(
    "model",
    [
        GPT2LMHeadModel(GPT2Config(vocab_size=14, n_embd=8, n_layer=1, n_head=2)),
        Qwen2ForCausalLM(
            Qwen2Config(
                **SMALL,
                use_sliding_window=True,
                sliding_window=4,
                layer_types=["full_attention", "sliding_attention"],
            )
        ),
    ],
    ids=["another family", "a sliding window"],
)
def test_other_models_are_left_to_their_own_forward_pass(model):
    assert not decodes(model, new_cache(model.config, 8))
