"""The experts of the tokens of a batch (ROUTED_COLUMNS), row by row and at the places of a model's
input.
"""

from __future__ import annotations

import numpy as np

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.packed_arrays import unpack_arrays
from rl_protocol.batch.routed_experts import NOT_RECORDED, ExpertIds, computed_tokens
from rl_protocol.errors import BatchError
from rl_protocol.rl_columns import ROUTED, ROUTED_COLUMNS


def computed_lengths(batch: BatchData) -> list[int]:
    """[N], the tokens of each row that a forward pass computes."""
    lengths = zip(batch.ragged("prompts").lengths, batch.ragged("responses").lengths, strict=True)
    return [computed_tokens(int(prompt), int(response)) for prompt, response in lengths]


def experts_of(batch: BatchData) -> list[ExpertIds] | None:
    """The experts of each row [tokens, layers, K]; None: the batch has no such columns.

    Args:
        batch: `prompts`, `responses`, and ROUTED_COLUMNS.

    Raises:
        BatchError: a row has experts of more or fewer tokens than a forward pass computes.
    """
    if not all(name in batch for name in ROUTED_COLUMNS):
        return None
    found = [rows[0] for rows in unpack_arrays(batch, ROUTED)]
    for row, (one, tokens) in enumerate(zip(found, computed_lengths(batch), strict=True)):
        if len(one) != tokens:
            raise BatchError(
                f"Row {row} has {tokens} tokens of prompt and response with a forward pass, and experts of {len(one)} tokens."
            )
    return found


def experts_at_places(batch: BatchData, width: int) -> ExpertIds | None:
    """The experts at the places of N sequences, padded on the right.

    Args:
        batch: see `experts_of`.
        width: places of each sequence.

    Returns:
        int16 [N, width, layers, K], -1 where a place has none; None: no row has experts.

    Raises:
        BatchError: see `experts_of`; or rows have different numbers of layers or K.
    """
    rows = list(experts_of(batch) or ())
    shapes = {one.shape[1:] for one in rows if one.shape[1]}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise BatchError(f"Rows of one batch have experts of different layers or numbers per token: {sorted(shapes)}.")
    out = np.full((len(rows), width, *shapes.pop()), NOT_RECORDED, np.int16)
    for row, one in enumerate(rows):
        if one.shape[1]:
            out[row, : len(one)] = one
    return out
