"""Cuts rows into forward passes, equally many on all ranks, since each pass is a collective."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rl_protocol import BatchData, RaggedColumn
from rl_trainer.algorithms.arrays import IntArray
from rl_trainer.algorithms.batching import micro_batches
from rl_trainer.backends.token_batch import lengths_of
from rl_trainer.backends.world import World
from rl_trainer.config.optim import PASS_TOKENS, UpdateConfig


@dataclass(frozen=True, kw_only=True)
class ForwardPasses:
    """How rows are cut into forward passes: by tokens if `max_tokens` is set, by rows if `max_rows`
    is set, else by PASS_TOKENS, where a longer row is a pass of its own.

    Attributes:
        world: the ranks that run the passes together.
        max_rows: rows per pass.
        max_tokens: tokens per pass.
        padded: whether the rows of a pass are padded to the longest, which PASS_TOKENS includes.
    """

    world: World
    max_rows: int = 0
    max_tokens: int = 0
    padded: bool = False

    @classmethod
    def of(cls, world: World, config: UpdateConfig, max_rows: int | None = None) -> ForwardPasses:
        """The passes of an update; `max_rows` is for those without gradients."""
        rows = config.ppo_micro_batch_size if max_rows is None else max_rows
        return cls(
            world=world, max_rows=rows, max_tokens=config.ppo_max_token_len, padded=not config.use_remove_padding
        )

    def cut(self, lengths: IntArray, rows: Sequence[int]) -> list[list[int]]:
        """Cut `rows`, which index `lengths` [N], into parts.

        Empty parts follow at the end if another rank makes more passes.

        Raises:
            BatchError: a row is longer than max_tokens.
        """
        parts = self._parts(lengths[list(rows)], rows)
        return parts + [[]] * (self.world.largest(len(parts)) - len(parts))

    def _parts(self, lengths: IntArray, rows: Sequence[int]) -> list[list[int]]:
        """Parts of `rows`, which have these lengths."""
        by_rows = self.max_rows and not self.max_tokens
        longest = int(lengths.max(initial=1))
        size = self.max_rows if by_rows else max(PASS_TOKENS // longest, 1)
        if by_rows or (not self.max_tokens and (self.padded or len(rows) <= size)):
            return [list(rows[start : start + size]) for start in range(0, len(rows), size)]
        most = self.max_tokens or max(PASS_TOKENS, longest)
        return [[rows[i] for i in part] for part in micro_batches(lengths, most)]


def silent(batch: BatchData) -> BatchData:
    """The first row with an all-false mask: what a rank computes while it has nothing to add."""
    row = batch.select_rows([0])
    mask = row.ragged("response_mask")
    return BatchData({**row.columns, "response_mask": dataclasses.replace(mask, values=np.zeros_like(mask.values))})


def per_token(
    batch: BatchData,
    passes: ForwardPasses,
    names: Sequence[str],
    compute: Callable[[BatchData], Sequence[torch.Tensor | RaggedColumn]],
) -> BatchData:
    """Compute ragged columns, aligned with the responses, without gradients.

    `compute` gets parts of the batch, and returns one tensor for each of `names`: float32 [T]; or
    [T, K], whose column has K values for each token; or int64, whose column is int32; or a column.
    """
    parts, order = list[BatchData](), list[int]()
    with torch.no_grad():
        for rows in passes.cut(lengths_of(batch), range(len(batch))):
            part = batch.select_rows(rows or [0])
            values = zip(names, compute(part), strict=True)
            offsets = part.ragged("responses").offsets
            columns = {
                name: value if isinstance(value, RaggedColumn) else _aligned(value, offsets) for name, value in values
            }
            if rows:
                parts.append(BatchData(columns))
                order += rows
    if not parts:
        nothing = np.zeros(0, np.float32)
        return BatchData({name: RaggedColumn(nothing, batch.ragged("responses").offsets, "float32") for name in names})
    return BatchData.concat(parts).reorder(np.argsort(order))


def _aligned(value: torch.Tensor, offsets: IntArray) -> RaggedColumn:
    width = value.shape[1] if value.dim() > 1 else 1
    kept = value.float() if value.is_floating_point() else value.int()
    dtype = "float32" if value.is_floating_point() else "int32"
    return RaggedColumn(kept.flatten().cpu().numpy(), offsets * width, dtype)
