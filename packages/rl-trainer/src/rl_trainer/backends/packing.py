"""Attention for sequences joined end to end (packed).

Sequences of similar lengths are laid out as [sequences, longest] for attention, and gathered
afterwards; sequences of equal lengths are only viewed so. Padding comes after the real tokens,
where causal attention never looks, so only a sliding window needs a mask. The rest of the model,
which is most of its work, computes real tokens only, and those of a prompt once for all sequences
that share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

from rl_trainer.algorithms.arrays import BoolArray, IntArray

PACKED_ATTENTION = "rl_trainer_packed"
"""Name for `attn_implementation`."""
SIMILAR = 0.75
"""A sequence shorter than this share of the longest in its block begins a block of its own."""
BLOCK_PLACES = 512
"""A block has at least this many places, unless it is the last."""


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Where the T tokens of a packed input are in the blocks that attention computes.

    Sequences that begin with the same tokens may share these: they are then one token at several
    places.
    """

    blocks: tuple[tuple[int, int], ...]
    """(sequences, longest) of each block, whose places are [sequences, longest], row by row."""
    source: torch.Tensor
    """int64 [places of all blocks], the token at each place; at padding any one."""
    place: torch.Tensor
    """int64 [T], a place of each token."""
    joined: bool
    """The places are the tokens, in their order."""

    @classmethod
    def of(cls, tokens: TokenNumbers) -> PackedLayout:
        """Blocks of sequences with similar lengths."""
        lengths = tokens.real.sum(1)
        order = np.argsort(-lengths, kind="stable")
        blocks, sources, reals = list[tuple[int, int]](), list[IntArray](), list[BoolArray]()
        for start, stop in _spans(lengths[order]):
            longest = max(int(lengths[order[start]]), 1)
            blocks.append((stop - start, longest))
            sources.append(tokens.at[order[start:stop], :longest].ravel())
            reals.append(tokens.real[order[start:stop], :longest].ravel())
        source, real = np.concatenate(sources), np.flatnonzero(np.concatenate(reals))
        place = np.zeros_like(tokens.first)
        place[source[real]] = real
        joined = len(blocks) == 1 and len(source) == tokens.at.max() + 1
        return cls(blocks=tuple(blocks), source=torch.from_numpy(source), place=torch.from_numpy(place), joined=joined)

    def to(self, device: torch.device) -> PackedLayout:
        """The layout on a device."""
        return replace(self, source=self.source.to(device), place=self.place.to(device))


def _spans(lengths: IntArray) -> Iterator[tuple[int, int]]:
    """(start, stop) of the sequences of each block; `lengths` fall."""
    start = 0
    for i, length in enumerate(lengths):
        if length < SIMILAR * lengths[start] and (i - start) * lengths[start] >= BLOCK_PLACES:
            yield start, i
            start = i
    yield start, len(lengths)


@dataclass(frozen=True, kw_only=True)
class TokenNumbers:
    """Which of the T tokens of a packed input is where in N sequences.

    Attributes:
        at: int64 [N, longest], the token at each place; 0 at padding, which comes last.
        real: bool [N, longest], false at padding.
        first: int64 [T], the first place of each token in the flattened `at`. The last ones may be
            copies of a token, which no place has.
    """

    at: IntArray
    real: BoolArray
    first: IntArray

    @classmethod
    def of(cls, lengths: IntArray, owner: IntArray, shared: IntArray, multiple: int = 1) -> TokenNumbers:
        """Number the tokens sequence by sequence.

        Args:
            lengths: [N] tokens.
            owner: [N], the first sequence that begins with the same shared tokens.
            shared: [N], how many tokens it shares with its owner.
            multiple: T is a multiple of it, by copies of the last token, unless all sequences are
                equally long and share nothing: numbers of these recur as they are.
        """
        places = np.arange(lengths.max(initial=1))
        real, begins = places < lengths[:, None], places < shared[:, None]
        new = real & ((owner == np.arange(len(owner)))[:, None] | ~begins)
        number = np.cumsum(new).reshape(new.shape) - 1
        at = np.where(real, np.where(begins, number[owner], number), 0)
        first = np.flatnonzero(new)
        if not new.all():
            first = np.pad(first, (0, -len(first) % multiple), mode="edge")
        return cls(at=at, real=real, first=first)


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

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[sequences * longest, heads, D] of [sequences, heads, longest, D]."""
        mask, longest = None, q.shape[2]
        if sliding_window is not None and sliding_window < longest:
            mask = _within(sliding_window, longest, q.device)
        return _attend(q, k, v, scaling, mask).transpose(1, 2).flatten(0, 1)

    if layout.joined:
        ((n, _longest),) = layout.blocks
        return attend(_cut(query, n), _cut(key, n), _cut(value, n))[None], None

    def apart(x: torch.Tensor) -> Sequence[torch.Tensor]:
        laid_out = x[0].transpose(0, 1).index_select(0, layout.source)
        sizes = [sequences * longest for sequences, longest in layout.blocks]
        return [
            part.unflatten(0, block).transpose(1, 2)
            for part, block in zip(laid_out.split(sizes), layout.blocks, strict=True)
        ]

    blocks = zip(apart(query), apart(key), apart(value), strict=True)
    return torch.cat([attend(*block) for block in blocks]).index_select(0, layout.place)[None], None


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
    """Attention over [sequences, heads, length, D] within `mask`; None: causal.

    On the CPU, flash attention computes small products for each head of each sequence, which takes
    longer than those of all pairs of tokens at once; its backward pass in bfloat16 takes three
    times as long as in float32. So pairs are computed at once, in float32, for sequences of at most
    2 D tokens: these have at most twice as many pairs as their queries have numbers.

    On CUDA only flash attention takes fewer heads of keys than of queries, and it takes neither a
    mask nor float32; with those the kernel that keeps all pairs of tokens would be left.
    """
    groups, (length, size) = query.shape[1] // key.shape[1], query.shape[2:]
    if query.is_cpu and length <= 2 * size:
        scale = size**-0.5 if scaling is None else scaling
        return _attend_to_pairs(query.float(), key.float(), value.float(), scale, mask).to(query.dtype)
    if groups > 1 and query.is_cuda and (mask is not None or query.dtype == torch.float32):
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def _attend_to_pairs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """`_attend` in float32 with the scores of all pairs of tokens in memory."""
    sequences, heads, length, size = query.shape
    groups = heads // key.shape[1]
    seen = _within(length, length, query.device) if mask is None else mask
    added = torch.zeros(length, length).masked_fill_(~seen, -torch.inf).repeat(groups, 1)
    queries = query.reshape(-1, groups * length, size)
    scores = torch.baddbmm(added, queries, key.reshape(-1, length, size).transpose(1, 2), alpha=scaling)
    attended = torch.bmm(torch.softmax(scores, -1), value.reshape(-1, length, size))
    return attended.view(sequences, heads, length, size)


def register_packed_attention() -> None:
    """Register the attention with transformers; safe to call again."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
