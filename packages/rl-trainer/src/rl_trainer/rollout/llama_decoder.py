"""One token per row through a model of the Llama family, with few operations per layer.

The modules of transformers split a layer into many small operations, whose fixed costs dominate
where the model or the batch is small. The parameters are the model's own, without a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812
from transformers import DynamicCache, LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from rl_trainer.kernels.elementwise import Rotation, rms_norm, rotate, rotation
from rl_trainer.kernels.linear import linear
from rl_trainer.rollout.kv_cache import PreallocatedLayer

FAMILY = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


def decodes(model: Any, cache: DynamicCache) -> bool:
    """Whether the model is of the family and all its layers have full attention, so that
    `next_logits` computes what its forward pass does."""
    return type(model) in FAMILY and all(isinstance(layer, PreallocatedLayer) for layer in cache.layers)


def next_logits(
    model: Any, cache: DynamicCache, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Append one token to each row; returns logits [B, vocabulary] of the next one.

    Args:
        model: `decodes` is true of it.
        cache: of the prompts and the tokens before.
        tokens: int64 [B, 1].
        positions: int64 [B, 1], of the tokens.
        mask: added to the attention scores, [B, 1, 1, tokens of a row with this one]; None: no row
            has padding.
    """
    body = model.model
    hidden = body.embed_tokens(tokens)[:, 0]
    cos, sin = body.rotary_emb(hidden, positions)  # [B, 1, head]
    turn = rotation(cos, sin)
    for layer, memory in zip(body.layers, cache.layers, strict=True):
        normed = _rms_norm(layer.input_layernorm, hidden)
        attended = _attend(layer.self_attn, memory, normed, turn, mask)
        hidden = _add_linear(hidden, layer.self_attn.o_proj, attended)
        normed, mlp = _rms_norm(layer.post_attention_layernorm, hidden), layer.mlp
        gated = mlp.act_fn(_linear(mlp.gate_proj, normed)).mul_(_linear(mlp.up_proj, normed))
        hidden = _add_linear(hidden, mlp.down_proj, gated)
    return model.lm_head(_rms_norm(body.norm, hidden))


def _rms_norm(module: Any, states: torch.Tensor) -> torch.Tensor:
    return rms_norm(states, module.weight, module.variance_epsilon)


def _linear(module: Any, states: torch.Tensor) -> torch.Tensor:
    return linear(states, module.weight, module.bias)


def _add_linear(hidden: torch.Tensor, module: Any, states: torch.Tensor) -> torch.Tensor:
    """Add the module's output to `hidden`, in place."""
    return hidden.add_(_linear(module, states))


def _attend(module: Any, memory: Any, normed: torch.Tensor, turn: Rotation, mask: torch.Tensor | None) -> torch.Tensor:
    """Attention of one token per row to itself and those in `memory`, [B, heads * head size]."""
    rows, size = len(normed), module.head_dim
    queries = _linear(module.q_proj, normed).view(rows, -1, size)
    keys = _linear(module.k_proj, normed).view(rows, -1, size)
    values = _linear(module.v_proj, normed).view(rows, -1, 1, size)
    if hasattr(module, "q_norm"):  # Qwen3
        queries, keys = _rms_norm(module.q_norm, queries), _rms_norm(module.k_norm, keys)
    # heads that share a key are queries beside each other
    queries = rotate(queries, turn).view(rows, values.shape[1], -1, size)
    all_keys, all_values = memory.update(rotate(keys, turn)[:, :, None], values)
    attended = F.scaled_dot_product_attention(queries, all_keys, all_values, attn_mask=mask, scale=module.scaling)
    return attended.reshape(rows, -1)
