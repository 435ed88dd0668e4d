"""Columns of the experts that a forward pass has used."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl_protocol import BatchData, RaggedColumn, pack_arrays
from rl_protocol.rl_columns import ROUTED, ROUTED_COLUMNS
from rl_protocol.routed_tokens import computed_lengths
from rl_trainer.algorithms.arrays import IntArray


def recorded_columns(chosen: Sequence[torch.Tensor | None], batch: BatchData, at: IntArray) -> list[RaggedColumn]:
    """ROUTED_COLUMNS of a forward pass.

    Args:
        chosen: of each layer the experts of all places of the input [places, K].
        batch: `prompts` and `responses` of its N rows.
        at: int64 [N, longest], the place of the input that has each token.
    """
    experts = torch.stack([layer for layer in chosen if layer is not None], 1).to(torch.int16).cpu().numpy()
    rows = [[experts[at[row, :tokens]]] for row, tokens in enumerate(computed_lengths(batch))]
    packed = pack_arrays(ROUTED, rows, ndim=3, dtype="int16")
    return [packed[name] for name in ROUTED_COLUMNS]
