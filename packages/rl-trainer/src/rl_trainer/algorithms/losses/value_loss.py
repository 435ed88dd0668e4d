"""The loss of the critic: clipped value loss, aggregated over a mini-batch, and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rl_protocol import BatchData
from rl_trainer.algorithms.losses.aggregate import BatchCounts, add_masked, aggregate
from rl_trainer.algorithms.metrics import WeightedMeans, explained_variance
from rl_trainer.config import CriticConfig


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, cliprange: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped value loss per token, as in OpenAI's ppo2.

    Half the larger of two squared errors: that of V, and that of V clipped to within `cliprange` of
    the old V.

    Returns:
        loss [T], clipped [T] (bool: the clip took effect).
    """
    move = values - old_values
    bounded = old_values + move.clamp(-cliprange, cliprange)
    plain_error, bounded_error = (values - returns) ** 2, (bounded - returns) ** 2
    outside = move.abs() > cliprange  # within, the two errors differ only by rounding
    return 0.5 * torch.maximum(plain_error, bounded_error), outside & (bounded_error > plain_error)


@dataclass(frozen=True, kw_only=True)
class ValueColumns:
    """Columns of a micro-batch of `rows` complete trajectories, flat: T response tokens.

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
    """The value loss of a micro-batch, as its share of the mini-batch; for any backend."""

    def __init__(self, config: CriticConfig) -> None:
        self._config = config

    def __call__(
        self, values: torch.Tensor, tokens: ValueColumns, counts: BatchCounts, means: WeightedMeans
    ) -> torch.Tensor:
        """The micro-batch's share of the loss; adds metrics to `means`.

        Args:
            values: [T] of the state before each token, with gradient.
            tokens: the other columns.
            counts: sizes of the whole mini-batch.
            means: token means over the mini-batches, weighted by their unmasked tokens.
        """
        config, mask = self._config, tokens.mask
        loss, clipped = value_loss(values, tokens.values, tokens.returns, config.cliprange_value)
        add_masked(means, {"vf_loss": loss, "vf_clipfrac": clipped, "vpred_mean": values}, mask)
        return aggregate(loss, mask, tokens.row, tokens.rows, counts, config.loss_agg_mode)


def value_fit(
    batch: BatchData,
    mini_batches: Sequence[Sequence[int]],
    sum_over_ranks: Callable[[Sequence[float]], list[float]] = list,
) -> dict[str, float]:
    """`critic/vf_explained_var`: variance of the returns explained by the values before the update.

    Computed over the mini-batches of all ranks, where each row is once per epoch. A row that is on
    one rank in one epoch, and on another rank in the next, is in the batches of both.

    Args:
        batch: the rows of this rank.
        mini_batches: its rows in each mini-batch.
        sum_over_ranks: the sum of each number over the ranks.
    """
    columns = batch.select_fields(["response_mask", "values", "returns"])
    rows = columns.select_rows([row for mini_batch in mini_batches for row in mini_batch])
    mask = rows.ragged("response_mask").values.astype(np.bool_)
    values, returns = (rows.ragged(name).values.astype(np.float64)[mask] for name in ("values", "returns"))
    return {"critic/vf_explained_var": explained_variance(values, returns, sum_over_ranks)}
