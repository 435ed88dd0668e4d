"""Aggregates token losses into one number (`loss_agg_mode`), normalized by the whole mini-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rl_protocol import ConfigError
from rl_protocol.support.options import nearest
from rl_trainer.algorithms.metrics import WeightedMeans
from rl_trainer.config.actor import LOSS_AGG_MODES


@dataclass(frozen=True, kw_only=True)
class BatchCounts:
    """Sizes of the whole mini-batch, over all micro-batches and ranks.

    Losses are normalized by them, so the result does not depend on how the mini-batch is split.
    """

    tokens: int
    """Unmasked response tokens."""
    sequences: int
    """Trajectories with at least one unmasked token."""


def add_masked(means: WeightedMeans, values: Mapping[str, torch.Tensor], mask: torch.Tensor) -> None:
    """Add the sums of the unmasked elements of values [T], weighted by their number.

    Synchronizes with a GPU twice, however many values there are.
    """
    kept = torch.arange(len(mask), device=mask.device)[mask]
    sums = [value.detach().index_select(0, kept).sum().double() for value in values.values()]
    means.add(dict(zip(values, torch.stack(sums).cpu().tolist(), strict=True)), float(len(kept)))


def masked_counts(mask: torch.Tensor, row: torch.Tensor, rows: int) -> torch.Tensor:
    """Unmasked tokens of each of `rows` trajectories, float [rows]."""
    return torch.zeros(rows, dtype=torch.float32, device=mask.device).index_add_(0, row, mask.float())


def row_sums(x: torch.Tensor, mask: torch.Tensor, row: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows] sum of the unmasked elements of x [T] by trajectory.

    Masked tokens get no gradient, even where x is not finite.
    """
    kept = torch.where(mask, x, torch.zeros_like(x))
    return torch.zeros(rows, dtype=x.dtype, device=x.device).index_add_(0, row, kept)


def row_means(x: torch.Tensor, mask: torch.Tensor, row: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows] mean of the unmasked elements of x [T] by trajectory; 0 without any."""
    return row_sums(x, mask, row, rows) / masked_counts(mask, row, rows).clamp(min=1)


def aggregate(
    loss: torch.Tensor,
    mask: torch.Tensor,
    row: torch.Tensor,
    rows: int,
    counts: BatchCounts,
    mode: str,
    scale_factor: float = 1.0,
) -> torch.Tensor:
    """This micro-batch's share of the mini-batch loss.

    The shares of all micro-batches and ranks sum to the loss. A backend that averages gradients
    over ranks instead of summing them, as FSDP does, must multiply the share by the number of
    ranks. Trajectories without an unmasked token do not count.

        token-mean                sum over tokens / number of tokens (DAPO)
        token-sum                 sum over tokens
        seq-mean-token-sum        mean over trajectories of their token sums
        seq-mean-token-sum-norm   the same / scale_factor, a fixed length (Dr. GRPO)
        seq-mean-token-mean       mean over trajectories of their token means (GRPO)

    Args:
        loss: [T] per token.
        mask: bool [T].
        row: int64 [T] trajectory of each token, 0..rows-1.
        rows: trajectories in this micro-batch.
        counts: sizes of the whole mini-batch.
        mode: one of LOSS_AGG_MODES.
        scale_factor: in tokens, for seq-mean-token-sum-norm only.

    Raises:
        ConfigError: unknown mode.
    """
    if mode == "token-mean":
        return torch.where(mask, loss, torch.zeros_like(loss)).sum() / max(counts.tokens, 1)
    if mode == "token-sum":
        return torch.where(mask, loss, torch.zeros_like(loss)).sum()
    if mode == "seq-mean-token-mean":
        return row_means(loss, mask, row, rows).sum() / max(counts.sequences, 1)
    if mode not in LOSS_AGG_MODES:
        raise ConfigError(
            f"loss_agg_mode must be one of {', '.join(LOSS_AGG_MODES)}; got {mode!r}.{nearest(mode, LOSS_AGG_MODES)}"
        )
    length = scale_factor if mode == "seq-mean-token-sum-norm" else 1.0
    return row_sums(loss, mask, row, rows).sum() / (max(counts.sequences, 1) * length)
