"""Join prompts and responses as padded model input, and find the outputs that predict responses.

Legend: N rows, P_i prompt tokens and R_i response tokens of row i, T response tokens of all rows, W
a padded width. Needs the extra `[torch]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_protocol.batch.columns import RaggedColumn
from rl_protocol.errors import BatchError


def mask_right(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """bool [N, width], true at the first `lengths[i]` positions of row i: right padding."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def mask_left(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """bool [N, width], true at the last `lengths[i]` positions of row i: left padding."""
    return torch.arange(width, device=lengths.device) >= width - lengths[:, None]


def position_ids(mask: torch.Tensor) -> torch.Tensor:
    """int64 [N, W]: the number of real tokens before each one; 0 at padding. `mask` is bool [N,
    W]."""
    return (mask.long().cumsum(-1) - 1).masked_fill(~mask, 0)


def response_places(total: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """int64 [T]: for each response token the position whose output predicts it, one before its own.

    Positions are counted over the tokens of all rows in order, as in packed model inputs.

    >>> response_places(torch.tensor([3, 4]), torch.tensor([1, 3])).tolist()
    [1, 3, 4, 5]

    Args:
        total: int64 [N], P_i + R_i.
        response: int64 [N], R_i.

    Raises:
        BatchError: a row has an empty prompt, so nothing predicts its first response token; names
            the row.
    """
    empty = (total <= response).nonzero()
    if empty.numel():
        row = int(empty[0])
        raise BatchError(
            f"Row {row} has {int(total[row])} positions for {int(response[row])} response tokens; every prompt needs at least one token."
        )
    return _ranges(total.cumsum(0) - response - 1, response)


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """N prompts, each followed by its response, padded on the right to W places."""

    ids: torch.Tensor
    """int64 [N, W]."""
    real: torch.Tensor
    """bool [N, W], true at real tokens."""
    row: torch.Tensor
    """int64 [T], the row of each response token."""
    place: torch.Tensor
    """int64 [T], the place in that row whose output predicts the token."""
    targets: torch.Tensor
    """int64 [T], the response tokens."""


def pad_sequences(prompts: RaggedColumn, responses: RaggedColumn, *, multiple: int = 1, fill: int = 0) -> Sequences:
    """Join the prompt and the response tokens of every row.

    >>> from rl_protocol import ragged
    >>> joined = pad_sequences(ragged([[1, 2], [3]], "int64"), ragged([[7], [8, 9, 10]], "int64"))
    >>> joined.ids.tolist(), joined.place.tolist()
    ([[1, 2, 7, 0], [3, 8, 9, 10]], [1, 0, 1, 2])

    Args:
        prompts: prompt tokens.
        responses: response tokens.
        multiple: W is the smallest multiple of this that holds the longest row and is not 0.
        fill: the padding token.

    Raises:
        BatchError: a prompt is empty; names the row.
    """
    p, r = torch.from_numpy(prompts.lengths), torch.from_numpy(responses.lengths)
    targets = torch.tensor(responses.values, dtype=torch.int64)
    total = p + r
    place = response_places(total, r)
    row = torch.arange(len(r)).repeat_interleave(r)
    longest = max(int(total.max()), 1) if total.numel() else 1
    width = -(-longest // multiple) * multiple
    before, real = mask_right(p, width), mask_right(total, width)
    ids = torch.full((len(p), width), fill, dtype=torch.int64)
    ids[before], ids[real & ~before] = torch.tensor(prompts.values, dtype=torch.int64), targets
    return Sequences(ids=ids, real=real, row=row, place=place - (total.cumsum(0) - total)[row], targets=targets)


def _ranges(start: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The flat positions start[i] .. start[i] + lengths[i] - 1 of all rows, in order."""
    ends = lengths.cumsum(0)
    return torch.arange(int(lengths.sum()), device=start.device) + (start - ends + lengths).repeat_interleave(lengths)
