"""The rows of Megatron-Core's fused modules. Needs torch, and no Megatron-Core."""

from __future__ import annotations

import torch

from rl_megatron_peft.base_model.model_shape import ModelShape
from rl_megatron_peft.base_model.naming import qkv_rows


def fuse(parts: list[torch.Tensor], fused: str, shape: ModelShape, tensor: int) -> torch.Tensor:
    """Join the rows of q, k and v, or of gate and up, as one of `tensor` ranks holds them."""
    joined = torch.cat(parts) if len(parts) > 1 else parts[0]
    return joined[torch.tensor(fused_order(shape, tensor), device=joined.device)] if fused == "linear_qkv" else joined


def unfuse(weight: torch.Tensor, fused: str, shape: ModelShape, tensor: int) -> list[torch.Tensor]:
    """Split the rows of a fused module into its logical modules; the inverse of `fuse`."""
    if fused == "linear_qkv":
        rows = qkv_rows(shape.heads // tensor, shape.groups // tensor, shape.head_dim)
        return [weight[torch.tensor(part, device=weight.device)] for part in rows]
    return list(weight.chunk(2)) if fused == "linear_fc1" else [weight]


def fused_order(shape: ModelShape, tensor: int) -> list[int]:
    """Return for each row of linear_qkv on one of `tensor` ranks its index in q, k and v joined."""
    q, k, v = qkv_rows(shape.heads // tensor, shape.groups // tensor, shape.head_dim)
    order = [0] * (len(q) + len(k) + len(v))
    for joined, row in enumerate([*q, *k, *v]):
        order[row] = joined
    return order
