"""The optimisation loop that policy and critic share: epochs, mini-batches, micro-batches, clipping, schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from rl_protocol import BatchData
from rl_trainer.algorithms.batching import mini_batches
from rl_trainer.algorithms.episodes import IntArray
from rl_trainer.algorithms.losses import BatchCounts
from rl_trainer.config import OptimConfig
from rl_trainer.metrics import WeightedMeans

MicroLoss = Callable[[BatchData, BatchCounts, WeightedMeans], torch.Tensor]
"""(micro-batch, sizes of the mini-batch, where to add token sums) -> this micro-batch's share of the loss."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a batch is cut up."""

    epochs: int
    mini_batch_rows: int
    micro_batch_rows: int
    """0: the whole mini-batch."""
    seed: int


def schedule_rows(lengths: IntArray, schedule: Schedule, update: int) -> Iterator[list[int]]:
    """Row numbers of each mini-batch, alike in tokens; every epoch deals the rows anew, drawn from (seed, update, epoch).

    There are as many mini-batches as needed to keep each within `mini_batch_rows`; `lengths` [N] are the tokens of each row.
    """
    for epoch in range(schedule.epochs if lengths.size else 0):
        rng = np.random.default_rng((schedule.seed, update, epoch))
        yield from mini_batches(lengths, -(-lengths.size // schedule.mini_batch_rows), rng)


def count(batch: BatchData) -> BatchCounts:
    """Unmasked tokens, and trajectories that have any."""
    mask = batch.ragged("response_mask")
    running = np.concatenate([[0], np.cumsum(mask.values, dtype=np.int64)])
    per_row = running[mask.offsets[1:]] - running[mask.offsets[:-1]]
    return BatchCounts(tokens=int(per_row.sum()), sequences=int((per_row > 0).sum()))


class Optimiser:
    """AdamW with linear warm-up, gradient clipping and the mini-batch loop.

    A mini-batch whose gradient is not finite is skipped and counted in `skipped_steps`.
    """

    def __init__(self, model: torch.nn.Module, config: OptimConfig, schedule: Schedule) -> None:
        self._model = model
        self._config = config
        self._schedule = schedule
        self._adam = torch.optim.AdamW(
            model.parameters(), lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay
        )
        self._updates = 0
        self._optimizer_steps = 0

    def run(self, batch: BatchData, loss: MicroLoss) -> dict[str, float]:
        """Optimise over the batch; returns means of what `loss` added, `grad_norm`, `lr` and `skipped_steps`."""
        means, norms, skipped = WeightedMeans(), list[float](), 0
        lengths = batch.ragged("prompts").lengths + batch.ragged("responses").lengths
        for rows in schedule_rows(lengths, self._schedule, self._updates):
            mini = batch.select_rows(rows)
            counts = count(mini)
            self._adam.zero_grad(set_to_none=True)
            size = self._schedule.micro_batch_rows or len(mini)
            for start in range(0, len(mini), size):
                micro = mini.slice(start, min(start + size, len(mini)))
                loss(micro, counts, means).backward()
            norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.grad_clip))
            norms.append(norm)
            if np.isfinite(norm):
                self._step()
            else:
                skipped += 1
        self._updates += 1
        lr = float(self._adam.param_groups[0]["lr"])
        return {
            **means.result(),
            "grad_norm": float(np.mean(norms)) if norms else 0.0,
            "lr": lr,
            "skipped_steps": float(skipped),
        }

    def _step(self) -> None:
        self._optimizer_steps += 1
        warmup = self._config.lr_warmup_steps
        share = min(1.0, self._optimizer_steps / warmup) if warmup else 1.0
        for parameters in self._adam.param_groups:
            parameters["lr"] = self._config.lr * share
        self._adam.step()
