"""Megatron-Core's GPTModel: building this rank's part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from rl_megatron_peft.backend.cpu_shims import runnable
from rl_megatron_peft.backend.model.causal_attention import CausalAttention
from rl_megatron_peft.backend.model.expert_layer import LinearRouter, replace_dispatchers
from rl_megatron_peft.backend.parallel import Ranks
from rl_megatron_peft.base_model.layout import global_name
from rl_megatron_peft.base_model.model_shape import ModelShape

ADAPTER = "adapter"
"""Attribute of an adapter in its layer. Megatron-Bridge uses and skips parameters of this name."""

VALUE = "value"
"""Attribute of the linear layer in a value head."""


class RankNorm(torch.nn.RMSNorm):
    """RMSNorm that supports sequence parallelism, which the norm of the local spec refuses.

    A norm needs one token at a time, so each rank normalizes its own tokens. The gradient of the
    weight is then partial on each rank; see `rl_megatron_peft.backend.train.param_groups`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


def _layers(shape: ModelShape, ranks: Ranks) -> TransformerBlockSubmodules:
    """Return this stage's layers: those of the local spec with RankNorm and CausalAttention."""
    spec = get_gpt_layer_local_spec(
        qk_layernorm=shape.qk_norm, normalization="RMSNorm", num_experts=shape.experts or None
    )
    layer: Any = spec.submodules
    norm: Any = RankNorm  # declared ModuleSpec, documented as a class as well
    layer.input_layernorm = layer.pre_mlp_layernorm = RankNorm
    layer.self_attention.submodules.core_attention = CausalAttention
    if shape.qk_norm:
        layer.self_attention.submodules.q_layernorm = layer.self_attention.submodules.k_layernorm = RankNorm
    if shape.experts:
        layer.mlp.submodules.router = LinearRouter
    return TransformerBlockSubmodules([spec] * (shape.layers // ranks.layout.pipeline), layer_norm=norm)


def build_model(shape: ModelShape, ranks: Ranks, dtype: torch.dtype = torch.float32) -> GPTModel:
    """Build this rank's part of the model on its device, with uninitialized and frozen weights.

    Because they are frozen, a tied output layer on another stage than the embedding is a copy that
    needs no synchronization.

    Raises:
        ConfigError: the layout can't divide the model.
    """
    layout = ranks.layout
    layout.check(shape)
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # noqa: S106 - no password; the default refuses variable lengths
        num_moe_experts=shape.experts or None,
        moe_ffn_hidden_size=shape.ffn if shape.experts else None,
        moe_router_topk=shape.experts_per_token or 2,
        moe_router_pre_softmax=not shape.top_k_normalized,
        moe_router_load_balancing_type="none",
        expert_model_parallel_size=layout.expert,
        use_cpu_initialization=True,
        perform_initialization=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )
    with runnable():
        model = GPTModel(
            config,
            _layers(shape, ranks),  # pyright: ignore[reportArgumentType]: declared ModuleSpec, documented as either
            vocab_size=layout.padded_vocab(shape),
            max_sequence_length=shape.positions,
            pre_process=ranks.first,
            post_process=ranks.last,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied and layout.pipeline == 1,
            position_embedding_type="rope",
            rotary_base=shape.rope_base,  # pyright: ignore[reportArgumentType]: declared int, raised to powers
        )
        if shape.experts:
            replace_dispatchers(model)
    return model.requires_grad_(False).to(ranks.device, dtype).eval()


def first_layer(shape: ModelShape, ranks: Ranks) -> int:
    """Return the number of this stage's first layer in the whole model."""
    return ranks.pipeline * (shape.layers // ranks.layout.pipeline)


def first_expert(shape: ModelShape, ranks: Ranks) -> int:
    """Return the number of this rank's first expert in the whole model."""
    return ranks.expert * (shape.experts // ranks.layout.expert)


def base_parameters(model: GPTModel, shape: ModelShape, ranks: Ranks) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield this rank's base parameters, without adapters and value head, by their global names."""
    for name, parameter in model.named_parameters():
        if f".{ADAPTER}." not in name and f".{VALUE}." not in name:
            yield global_name(name, first_layer(shape, ranks), first_expert(shape, ranks)), parameter
