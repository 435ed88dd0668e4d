"""Attention of the layers of Megatron-Core's local spec."""

from __future__ import annotations

from typing import Any

import torch


class CausalAttention(torch.nn.Module):
    """Causal attention by torch's kernels, which keep no matrix of all pairs of tokens.

    That of the local spec keeps one for each head of each layer until the backward pass: of
    Qwen3-8B on two ranks and 4096 tokens in bfloat16, 18 GiB.

    Args:
        softmax_scale: scale of the scores; None: 1 / sqrt(size of a head).
    """

    def __init__(self, *, softmax_scale: float | None, **_: Any) -> None:
        super().__init__()
        self._scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
    ) -> torch.Tensor:
        """Attend to the tokens up to each one.

        Args:
            query, key, value: [tokens, rows, heads, D]; key and value may have fewer heads.

        Returns:
            [tokens, rows, heads * D].
        """
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and q.is_cuda and q.dtype == torch.float32:  # no kernel of a GPU groups these heads
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self._scale, enable_gqa=k.shape[1] != q.shape[1]
        )
        return out.permute(2, 0, 1, 3).flatten(2)
