"""Attention for sequences joined end to end (packed).

The tokens are laid out as [sequences, longest] for attention and gathered afterwards; sequences of
equal length are only viewed so. Padding comes after the real tokens, where causal attention never
looks, so only a sliding window needs a mask. The rest of the model, which is most of its work,
computes real tokens only, and those of a prompt once for all sequences that share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

from rl_trainer.algorithms.arrays import BoolArray, IntArray

PACKED_ATTENTION = "rl_trainer_packed"
"""Name for `attn_implementation`."""


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Where the T tokens of a packed input are in their sequences, [sequences, longest] places.

    Sequences that begin with the same tokens may share these: they are then one token at several
    places.
    """

    sequences: int
    longest: int
    """Tokens of the longest sequence."""
    source: torch.Tensor
    """int64 [sequences * longest], the token at each place; at padding any one."""
    place: torch.Tensor
    """int64 [T], a place of each token."""

    @classmethod
    def of(cls, starts: Sequence[int]) -> PackedLayout:
        """Of sequences that share nothing: the start of each, and T."""
        lengths = np.diff(starts)
        real = np.arange(lengths.max()) < lengths[:, None]
        return cls.numbered(real, np.arange(len(lengths)), np.zeros_like(lengths))

    @classmethod
    def numbered(cls, real: BoolArray, owner: IntArray, shared: IntArray) -> PackedLayout:
        """Number the tokens sequence by sequence.

        Args:
            real: [sequences, longest], false at padding, which comes last.
            owner: [sequences], the first sequence that begins with the same shared tokens.
            shared: [sequences], how many tokens it shares with its owner.
        """
        own = owner == np.arange(len(owner))
        begins = np.arange(real.shape[1]) < shared[:, None]
        new = real & (own[:, None] | ~begins)
        number = np.cumsum(new).reshape(new.shape) - 1
        source = np.where(real, np.where(begins, number[owner], number), 0)
        sequences, longest = real.shape
        return cls(
            sequences=sequences,
            longest=longest,
            source=torch.from_numpy(source.ravel()),
            place=torch.from_numpy(np.flatnonzero(new)),
        )

    def to(self, device: torch.device) -> PackedLayout:
        """The layout on a device."""
        return replace(self, source=self.source.to(device), place=self.place.to(device))


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    layout: PackedLayout,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence, with the signature that transformers calls.

    Args:
        module, attention_mask, dropout: ignored; training with policy ratios has no dropout.
        query, key, value: [1, heads, T, D]; key and value may have fewer heads.
        scaling: scale of the scores.
        layout: of the tokens.
        sliding_window: the last tokens that a token attends to, itself included; None: all.

    Returns:
        [1, T, heads, D], and None for the attention weights, which are not computed.
    """
    del module, attention_mask, dropout
    mask = None
    if sliding_window is not None and sliding_window < layout.longest:
        mask = _within(sliding_window, layout.longest, query.device)
    if query.shape[2] == layout.sequences * layout.longest:
        n = layout.sequences
        out = _attend(_cut(query, n), _cut(key, n), _cut(value, n), scaling, mask)
        return out.transpose(1, 2).flatten(0, 1)[None], None

    def apart(x: torch.Tensor) -> torch.Tensor:
        laid_out = x[0].transpose(0, 1).index_select(0, layout.source)
        return laid_out.unflatten(0, (layout.sequences, -1)).transpose(1, 2)

    out = _attend(apart(query), apart(key), apart(value), scaling, mask)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, layout.place)[None], None


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
