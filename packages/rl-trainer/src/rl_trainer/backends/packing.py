"""Attention for sequences joined end to end (packed).

The tokens are laid out as [sequences, longest] for attention and gathered afterwards. Padding comes
after the real tokens, where causal attention never looks, so no mask is needed. The rest of the
model, which is most of its work, computes real tokens only.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from rl_protocol import ConfigError

PACKED_ATTENTION = "rl_trainer_packed"
"""Name for `attn_implementation`."""


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence, with the signature that transformers calls.

    Args:
        module, attention_mask, dropout: ignored; training with policy ratios has no dropout.
        query, key, value: [1, heads, T, D]; key and value may have fewer heads.
        scaling: scale of the scores.
        cu_seq_lens_q: int64 [sequences + 1], start of each sequence, and T.
        max_length_q: tokens of the longest sequence.
        sliding_window: must be None.

    Returns:
        [1, T, heads, D], and None for the attention weights, which are not computed.

    Raises:
        ConfigError: the model's attention has a sliding window.
    """
    del module, attention_mask, dropout
    if sliding_window is not None and sliding_window < max_length_q:
        raise ConfigError(
            f"use_remove_padding=true does not know this model's sliding window of {sliding_window} tokens; set it to false."
        )
    tokens, sequences = query.shape[2], cu_seq_lens_q.numel() - 1
    lengths = cu_seq_lens_q[1:] - cu_seq_lens_q[:-1]
    start = torch.repeat_interleave(cu_seq_lens_q[:-1], lengths, output_size=tokens)
    row = torch.repeat_interleave(torch.arange(sequences, device=query.device), lengths, output_size=tokens)
    place = row * max_length_q + torch.arange(tokens, device=query.device) - start

    def apart(x: torch.Tensor) -> torch.Tensor:
        heads, depth = x.shape[1], x.shape[3]
        laid_out = x.new_zeros(sequences * max_length_q, heads, depth).index_copy(0, place, x[0].transpose(0, 1))
        return laid_out.view(sequences, max_length_q, heads, depth).transpose(1, 2)

    out = torch.nn.functional.scaled_dot_product_attention(
        apart(query),
        apart(key),
        apart(value),
        is_causal=True,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1)[place][None], None


def register_packed_attention() -> None:
    """Register the attention with transformers; safe to call again."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
