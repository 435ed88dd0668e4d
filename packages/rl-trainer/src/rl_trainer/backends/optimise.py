"""The optimisation loop that policy and critic share: mini-batches, forward passes, clipping, schedule; on one rank or several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from rl_protocol import BatchData
from rl_trainer.algorithms.losses import BatchCounts
from rl_trainer.algorithms.schedules import lr_factor
from rl_trainer.backends.passes import Passes, silent
from rl_trainer.backends.tokens import lengths_of
from rl_trainer.config import OptimConfig
from rl_trainer.metrics import WeightedMeans

MicroLoss = Callable[[BatchData, BatchCounts, WeightedMeans], torch.Tensor]
"""(micro-batch, sizes of the mini-batch over all ranks, where to add token sums) -> this micro-batch's share of the loss."""


def count(batch: BatchData) -> BatchCounts:
    """Unmasked tokens, and trajectories that have any."""
    mask = batch.ragged("response_mask")
    running = np.concatenate([[0], np.cumsum(mask.values, dtype=np.int64)])
    per_row = running[mask.offsets[1:]] - running[mask.offsets[:-1]]
    return BatchCounts(tokens=int(per_row.sum()), sequences=int((per_row > 0).sum()))


class Optimiser:
    """AdamW with a schedule, gradient clipping and the mini-batch loop, over the weights that want gradients.

    A mini-batch whose gradient is not finite is skipped and counted in `skipped_steps`.
    """

    def __init__(self, model: torch.nn.Module, config: OptimConfig, passes: Passes) -> None:
        self._config = config
        self._passes = passes
        self._named = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._weights = list(self._named.values())
        self._adam = torch.optim.AdamW(
            self._weights, lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay
        )
        self.steps = 0
        """Optimizer steps made: where the schedule is."""

    def moments(self) -> Mapping[str, torch.Tensor]:
        """What AdamW remembers, by `<weight>/<what>`; nothing of weights that it has never changed."""
        state = self._adam.state
        return {
            f"{name}/{what}": tensor
            for name, weight in self._named.items()
            if weight in state
            for what, tensor in state[weight].items()
        }

    def expect(self, moments: Iterable[str]) -> None:
        """Make room for these, named as above, so that `moments` gives tensors to be filled; names that mean nothing here are left out."""
        for moment in moments:
            name, _, what = moment.rpartition("/")
            weight = self._named.get(name)
            if weight is not None:
                self._adam.state[weight][what] = torch.tensor(0.0) if what == "step" else torch.zeros_like(weight)

    def run(self, batch: BatchData, mini_batches: Sequence[Sequence[int]], loss: MicroLoss) -> dict[str, float]:
        """Optimise over the mini-batches, this rank's rows of each (none is legal); all ranks call it with equally many.

        Returns:
            Means over all ranks of what `loss` added, `grad_norm`, `lr` and `skipped_steps`.
        """
        means, norms, skipped = WeightedMeans(), list[float](), 0
        for rows in mini_batches:
            norm = self._accumulate(batch, rows, loss, means)
            norms.append(norm)
            if np.isfinite(norm):
                self._step()
            else:
                skipped += 1
        return {
            **means.total(self._passes.world.total).result(),
            "grad_norm": float(np.mean(norms)) if norms else 0.0,
            "lr": float(self._adam.param_groups[0]["lr"]),
            "skipped_steps": float(skipped),
        }

    def _accumulate(self, batch: BatchData, rows: Sequence[int], loss: MicroLoss, means: WeightedMeans) -> float:
        """Gradients of one mini-batch, clipped; returns their norm before that."""
        world, own = self._passes.world, count(batch.select_rows(list(rows)))
        tokens, sequences = world.total([float(own.tokens), float(own.sequences)])
        counts = BatchCounts(tokens=int(tokens), sequences=int(sequences))
        self._adam.zero_grad(set_to_none=True)
        for part in self._passes.cut(lengths_of(batch), rows):
            micro = batch.select_rows(part) if part else silent(batch)
            (
                loss(micro, counts, means) * world.size
            ).backward()  # FSDP averages over the ranks; these are shares of a sum
        norm = torch.nn.utils.clip_grad_norm_(self._weights, self._config.grad_clip)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _step(self) -> None:
        self.steps += 1
        config = self._config
        factor = lr_factor(
            config.lr_scheduler_type,
            self.steps,
            warmup=config.lr_warmup_steps,
            decay=config.lr_decay_steps,
            least=config.min_lr_ratio,
        )
        for weights in self._adam.param_groups:
            weights["lr"] = config.lr * factor
        self._adam.step()
