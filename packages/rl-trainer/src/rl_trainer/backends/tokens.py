"""From ragged prompts and responses to what a transformers model takes, and back to flat response tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rl_protocol import BatchData, BatchError
from rl_protocol.columns import AnyArray


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """B trajectories, right-padded to L tokens; T = sum of response lengths.

    `position[k]` is the place whose output predicts response token k: one before the token itself (the left shift by one).
    """

    input_ids: torch.Tensor
    """int64 [B, L]."""
    attention_mask: torch.Tensor
    """int64 [B, L]."""
    row: torch.Tensor
    """int64 [T], trajectory of each response token."""
    position: torch.Tensor
    """int64 [T]."""
    targets: torch.Tensor
    """int64 [T], the response tokens."""


def token_batch(batch: BatchData, pad_id: int) -> TokenBatch:
    """Join `prompts` and `responses` of every row.

    Raises:
        BatchError: an empty prompt: nothing would predict the first response token.
    """
    prompts, responses = batch.ragged("prompts"), batch.ragged("responses")
    p, r = prompts.lengths, responses.lengths
    if (p == 0).any():
        raise BatchError(f"Row {int(np.argmin(p))} has an empty prompt; every prompt needs at least one token.")
    width = int((p + r).max(initial=1))
    ids = np.full((len(batch), width), pad_id, dtype=np.int64)
    columns = np.arange(width)[None, :]
    ids[columns < p[:, None]] = prompts.values
    ids[(columns >= p[:, None]) & (columns < (p + r)[:, None])] = responses.values
    row = np.repeat(np.arange(len(batch)), r)
    within = np.arange(responses.values.shape[0]) - np.repeat(responses.offsets[:-1], r)
    return TokenBatch(
        input_ids=torch.from_numpy(ids),
        attention_mask=torch.from_numpy((columns < (p + r)[:, None]).astype(np.int64)),
        row=torch.from_numpy(row),
        position=torch.from_numpy(np.repeat(p, r) + within - 1),
        targets=torch.tensor(responses.values, dtype=torch.int64),
    )


def flat(batch: BatchData, name: str) -> torch.Tensor:
    """A ragged float column as a flat float32 tensor [T]."""
    values: AnyArray = batch.ragged(name).values
    return torch.tensor(values, dtype=torch.float32)


def flag(batch: BatchData, name: str) -> torch.Tensor:
    """A ragged bool column as a flat bool tensor [T]."""
    return torch.tensor(batch.ragged(name).values, dtype=torch.bool)


def mask_of(batch: BatchData) -> torch.Tensor:
    """`response_mask` as a flat bool tensor [T]."""
    return flag(batch, "response_mask")
