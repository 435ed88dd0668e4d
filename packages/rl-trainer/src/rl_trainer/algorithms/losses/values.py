"""The whole loss of the value function, and how well it fits. Any backend can call them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rl_protocol import BatchData
from rl_trainer.algorithms.losses.aggregate import BatchCounts, aggregate
from rl_trainer.algorithms.losses.readout import value_loss
from rl_trainer.config import CriticConfig
from rl_trainer.metrics import WeightedMeans, explained_variance


@dataclass(frozen=True, kw_only=True)
class ValueColumns:
    """Columns of a micro-batch of `rows` whole trajectories, flat: T response tokens.

    Attributes:
        values: [T] before the update.
        returns: [T].
        mask: bool [T].
        row: int64 [T].
        rows: number of trajectories.
    """

    values: torch.Tensor
    returns: torch.Tensor
    mask: torch.Tensor
    row: torch.Tensor
    rows: int


class ValueObjective:
    """aggregate(value loss), as a micro-batch's share of its mini-batch."""

    def __init__(self, config: CriticConfig) -> None:
        self._config = config

    def __call__(
        self, values: torch.Tensor, tokens: ValueColumns, counts: BatchCounts, means: WeightedMeans
    ) -> torch.Tensor:
        """The share; adds what is to be reported to `means`.

        Args:
            values: [T] before each token is taken, with gradient.
            tokens: the other columns.
            counts: sizes of the whole mini-batch.
            means: token means over the mini-batches, weighted by their unmasked tokens.
        """
        config, mask = self._config, tokens.mask
        loss, clipped = value_loss(values, tokens.values, tokens.returns, config.cliprange_value)
        sums = {"vf_loss": loss, "vf_clipfrac": clipped, "vpred_mean": values}
        means.add({name: float(value.detach()[mask].sum()) for name, value in sums.items()}, float(mask.sum()))
        return aggregate(loss, mask, tokens.row, tokens.rows, counts, config.loss_agg_mode)


def value_fit(batch: BatchData, sum_over_ranks: Callable[[Sequence[float]], list[float]] = list) -> dict[str, float]:
    """`critic/vf_explained_var`: how much of the returns the values of before the update explain, over the rows of all ranks."""
    mask = batch.ragged("response_mask").values.astype(np.bool_)
    values, returns = (batch.ragged(name).values.astype(np.float64)[mask] for name in ("values", "returns"))
    return {"critic/vf_explained_var": explained_variance(values, returns, sum_over_ranks)}
