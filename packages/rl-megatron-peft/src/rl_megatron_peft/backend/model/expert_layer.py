"""Megatron-Core's layer of experts without Transformer Engine, on GPUs and on the CPU."""

from __future__ import annotations

from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher


class LinearRouter(TopKRouter):
    """Megatron's router with a product of torch.

    Megatron-Core 0.16 multiplies by a function of Transformer Engine, whose name is undefined
    where that is not installed. Delete this class once its import sets the name to None.
    """

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Return logits [tokens, rows, experts] of hidden states [tokens, rows, hidden]."""
        return torch.nn.functional.linear(input, self.weight)


class ListDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher of tokens, which also works on the CPU.

    Megatron-Core 0.16 copies the numbers of tokens to send from the GPU as arrays, which
    `torch.distributed.all_to_all_single` takes; on the CPU they stay tensors, which it refuses.
    """

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return hidden states and weights of experts, sorted by expert."""
        found = super().dispatch_preprocess(hidden_states, routing_map, probs)
        for name in ("input_splits", "output_splits"):
            sizes: object = getattr(self, name)
            if isinstance(sizes, torch.Tensor):
                setattr(self, name, sizes.tolist())
        return found


def replace_dispatchers(model: GPTModel) -> None:
    """Give each layer of experts a ListDispatcher, for which Megatron's spec has no place."""
    layers: list[Any] = list(cast(Any, model.decoder).layers)
    for layer in layers:
        experts: MoELayer = layer.mlp
        experts.token_dispatcher = ListDispatcher(
            experts.num_local_experts,
            experts.local_expert_indices,
            config=experts.config,
            pg_collection=get_default_pg_collection(),
        )
