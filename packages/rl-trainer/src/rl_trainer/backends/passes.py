"""Forward passes: which rows go together, so that all ranks make equally many (each is a collective for all of them)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from rl_protocol import BatchData, RaggedColumn
from rl_trainer.algorithms.batching import micro_batches
from rl_trainer.algorithms.episodes import IntArray
from rl_trainer.backends.tokens import lengths_of
from rl_trainer.backends.world import World


class PassConfig(Protocol):
    """What actor and critic say about it."""

    @property
    def ppo_micro_batch_size(self) -> int: ...

    @property
    def ppo_max_token_len(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Passes:
    """How rows are cut into forward passes: by tokens where `max_tokens` is set, else by rows.

    Attributes:
        world: the ranks that make them together.
        max_rows: rows per pass; 0: all.
        max_tokens: tokens per pass; 0: no bound.
    """

    world: World
    max_rows: int = 0
    max_tokens: int = 0

    def cut(self, lengths: IntArray, rows: Sequence[int]) -> list[list[int]]:
        """`rows`, numbers into `lengths` [N], in parts; empty ones at the end where another rank makes more passes.

        Raises:
            BatchError: a row longer than max_tokens.
        """
        if self.max_tokens:
            parts = [[rows[i] for i in part] for part in micro_batches(lengths[list(rows)], self.max_tokens)]
        else:
            size = self.max_rows or max(len(rows), 1)
            parts = [list(rows[start : start + size]) for start in range(0, len(rows), size)]
        return parts + [[]] * (self.world.largest(len(parts)) - len(parts))


def silent(batch: BatchData) -> BatchData:
    """The first row with a mask that is false everywhere: what a rank computes while it has nothing to add."""
    row = batch.select_rows([0])
    mask = row.ragged("response_mask")
    return BatchData({**row.columns, "response_mask": dataclasses.replace(mask, values=np.zeros_like(mask.values))})


def per_token(
    batch: BatchData, passes: Passes, names: Sequence[str], compute: Callable[[BatchData], Sequence[torch.Tensor]]
) -> BatchData:
    """Ragged float32 columns `names`, like the responses, from what `compute` says of parts of the batch: one [T] each. No gradients."""
    parts, order = list[BatchData](), list[int]()
    with torch.no_grad():
        for rows in passes.cut(lengths_of(batch), range(len(batch))):
            part = batch.select_rows(rows or [0])
            values = zip(names, compute(part), strict=True)
            offsets = part.ragged("responses").offsets
            columns = {name: RaggedColumn(value.float().cpu().numpy(), offsets, "float32") for name, value in values}
            if rows:
                parts.append(BatchData(columns))
                order += rows
    if not parts:
        nothing = np.zeros(0, np.float32)
        return BatchData({name: RaggedColumn(nothing, batch.ragged("responses").offsets, "float32") for name in names})
    return BatchData.concat(parts).select_rows(np.argsort(order))
