"""Attention for sequences joined end to end (packed).

The tokens are laid out as [sequences, longest] for attention and gathered afterwards; sequences of
equal length are only viewed so. Padding comes after the real tokens, where causal attention never
looks, so only a sliding window needs a mask. The rest of the model, which is most of its work,
computes real tokens only.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

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
        sliding_window: the last tokens that a token attends to, itself included; None: all.

    Returns:
        [1, T, heads, D], and None for the attention weights, which are not computed.
    """
    del module, attention_mask, dropout
    mask = None
    if sliding_window is not None and sliding_window < max_length_q:
        mask = _within(sliding_window, max_length_q, query.device)
    tokens, sequences = query.shape[2], cu_seq_lens_q.numel() - 1
    if tokens == sequences * max_length_q:
        out = _attend(_cut(query, sequences), _cut(key, sequences), _cut(value, sequences), scaling, mask)
        return out.transpose(1, 2).flatten(0, 1)[None], None
    lengths = cu_seq_lens_q[1:] - cu_seq_lens_q[:-1]
    shift = torch.arange(sequences, device=query.device) * max_length_q - cu_seq_lens_q[:-1]
    place = torch.repeat_interleave(shift, lengths, output_size=tokens) + torch.arange(tokens, device=query.device)

    def apart(x: torch.Tensor) -> torch.Tensor:
        heads, depth = x.shape[1], x.shape[3]
        laid_out = x.new_zeros(sequences * max_length_q, heads, depth).index_copy(0, place, x[0].transpose(0, 1))
        return laid_out.view(sequences, max_length_q, heads, depth).transpose(1, 2)

    out = _attend(apart(query), apart(key), apart(value), scaling, mask)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, place)[None], None


def _cut(x: torch.Tensor, sequences: int) -> torch.Tensor:
    """View [1, heads, T, D] as [sequences, heads, T / sequences, D]: all lengths are equal."""
    return x[0].unflatten(1, (sequences, -1)).transpose(0, 1)


def _within(window: int, length: int, device: torch.device) -> torch.Tensor:
    """bool [length, length]: which keys a query attends to, the last `window` up to itself."""
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return causal.triu(1 - window)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention over [sequences, heads, length, D] within `mask`; None: causal."""
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def register_packed_attention() -> None:
    """Register the attention with transformers; safe to call again."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
