"""Convert between nested and padded tensors, and select model outputs for response tokens.

Legend: N rows, P_i prompt tokens and R_i response tokens of row i, W a padded width, * further
dimensions. `nested` is always a jagged nested tensor that is ragged in dimension 1, even if all
lengths are equal. All functions are differentiable. Needs the extra `[torch]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from rl_protocol.errors import BatchError


@dataclass(frozen=True, kw_only=True)
class PaddedBatch:
    """N trajectories in the usual layout: prompts padded on the left, responses on the right.

    With prompts [1 2] and [3], responses [7] and [8 9], and pad 0:

        input_ids       1 2 7 0      attention_mask  1 1 1 0      position_ids  0 1 2 0
        response_mask  1 0
                        0 3 8 9                      0 1 1 1                    0 0 1 2
                        1 1
    """

    input_ids: torch.Tensor
    """int64 [N, P + R], where P and R are the padded widths."""
    attention_mask: torch.Tensor
    """bool [N, P + R], true at real tokens."""
    position_ids: torch.Tensor
    """int64 [N, P + R], 0 at padding."""
    response_mask: torch.Tensor
    """bool [N, R], true at real response tokens."""


def lengths_of(nested: torch.Tensor) -> torch.Tensor:
    """int64 [N], the length of every row.

    Raises:
        BatchError: not a contiguous jagged nested tensor that is ragged in dimension 1.
    """
    if not nested.is_nested or nested.layout != torch.jagged or cast(Any, nested)._ragged_idx != 1:
        other = "a nested tensor of another layout or ragged dimension"
        got = other if nested.is_nested else f"a dense tensor of shape {list(nested.shape)}"
        raise BatchError(f"Expected a jagged nested tensor ragged in dimension 1; got {got}.")
    jagged = cast(Any, nested)  # torch's stubs know no jagged tensors
    if jagged.lengths() is not None:
        raise BatchError("Expected a jagged nested tensor without holes; call contiguous() on this view first.")
    return jagged.offsets().diff()


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


def pad_right(nested: torch.Tensor, width: int | None = None, fill: float = 0) -> torch.Tensor:
    """[N, W, *], padded on the right; W defaults to the longest row.

    Raises:
        BatchError: a row is longer than `width`.
    """
    lengths = lengths_of(nested)
    return _scatter(nested, mask_right(lengths, _width(lengths, width)), fill)


def pad_left(nested: torch.Tensor, width: int | None = None, fill: float = 0) -> torch.Tensor:
    """[N, W, *], padded on the left; W defaults to the longest row.

    Raises:
        BatchError: a row is longer than `width`.
    """
    lengths = lengths_of(nested)
    return _scatter(nested, mask_left(lengths, _width(lengths, width)), fill)


def unpad(padded: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The elements where `mask` (bool [N, W]) is true, in order, as nested [N, j, *].

    Undoes both left and right padding.

    Raises:
        BatchError: `mask` is not of shape [N, W].
    """
    if padded.shape[:2] != mask.shape or mask.dtype != torch.bool:
        raise BatchError(
            f"A mask must be bool {list(padded.shape[:2])}; got {mask.dtype} {list(mask.shape)}. Use .bool() for masks of 0 and 1."
        )
    return _nested(padded[mask], mask.sum(-1))


def response_from_nested(tensor: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Select a model's outputs for the response tokens, shifted left by one.

    The output at position t predicts token t + 1, so the R_i response tokens at the end of a row of
    P_i + R_i are predicted at positions P_i - 1 .. P_i + R_i - 2.

    >>> places = torch.nested.nested_tensor_from_jagged(torch.arange(7), offsets=torch.tensor([0, 3, 7]))
    >>> mask = torch.nested.nested_tensor_from_jagged(torch.ones(4, dtype=torch.bool), offsets=torch.tensor([0, 1, 4]))
    >>> [row.tolist() for row in response_from_nested(places, mask).unbind()]
    [[1], [3, 4, 5]]

    Args:
        tensor: nested [N, P_i + R_i, *].
        response_mask: nested [N, R_i]; only its lengths matter.

    Returns:
        Nested [N, R_i, *], even if all lengths are equal.

    Raises:
        BatchError: a row has an empty prompt, so nothing predicts its first response token; names
            the row.
    """
    total, response = lengths_of(tensor), lengths_of(response_mask)
    if total.shape != response.shape:
        raise BatchError(f"Both need the same rows; got {total.shape[0]} and {response.shape[0]}.")
    return _nested(tensor.values()[response_places(total, response)], response)


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


def pad_sequences(
    prompts: tuple[torch.Tensor, torch.Tensor],
    responses: tuple[torch.Tensor, torch.Tensor],
    *,
    multiple: int = 1,
    fill: int = 0,
) -> Sequences:
    """Join prompts and responses, each given as (values of all rows, int64 [N] lengths).

    Args:
        prompts: prompt tokens.
        responses: response tokens.
        multiple: W is the smallest multiple of this that holds the longest row and is not 0.
        fill: the padding token.

    Raises:
        BatchError: a prompt is empty; names the row.
    """
    (asked, p), (answered, r) = prompts, responses
    total = p + r
    place = response_places(total, r)
    row = torch.arange(len(r)).repeat_interleave(r)
    longest = max(int(total.max()), 1) if total.numel() else 1
    width = -(-longest // multiple) * multiple
    before, real = mask_right(p, width), mask_right(total, width)
    ids = torch.full((len(p), width), fill, dtype=torch.int64)
    ids[before], ids[real & ~before] = asked.long(), answered.long()
    return Sequences(ids=ids, real=real, row=row, place=place - (total.cumsum(0) - total)[row])


def response_to_nested(padded: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Right-padded values of response tokens as a nested tensor: row i is `padded[i, :R_i]`.

    Args:
        padded: [N, W, *].
        response_mask: nested [N, R_i]; only its lengths matter.

    Raises:
        BatchError: the row counts differ, or a response is longer than W; names the row.
    """
    lengths = lengths_of(response_mask)
    if padded.shape[0] != lengths.shape[0]:
        raise BatchError(f"Both need the same rows; got {padded.shape[0]} and {lengths.shape[0]}.")
    return unpad(padded, mask_right(lengths, _width(lengths, padded.shape[1])))


def pad_batch(
    prompts: torch.Tensor,
    responses: torch.Tensor,
    *,
    pad_id: int,
    prompt_width: int | None = None,
    response_width: int | None = None,
) -> PaddedBatch:
    """Join nested prompts [N, P_i] and responses [N, R_i]; widths default to the longest.

    Raises:
        BatchError: the row counts differ, or a row is longer than its width.
    """
    p, r = lengths_of(prompts), lengths_of(responses)
    if p.shape != r.shape:
        raise BatchError(f"Both need the same rows; got {p.shape[0]} prompts and {r.shape[0]} responses.")
    response_mask = mask_right(r, _width(r, response_width))
    attention_mask = torch.cat([mask_left(p, _width(p, prompt_width)), response_mask], dim=1)
    ids = [pad_left(prompts, prompt_width, pad_id), pad_right(responses, response_width, pad_id)]
    return PaddedBatch(
        input_ids=torch.cat(ids, dim=1),
        attention_mask=attention_mask,
        position_ids=position_ids(attention_mask),
        response_mask=response_mask,
    )


def unpad_batch(batch: PaddedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Nested prompts [N, P_i] and responses [N, R_i]: the inverse of `pad_batch`."""
    width = batch.input_ids.shape[1] - batch.response_mask.shape[1]
    prompts = unpad(batch.input_ids[:, :width], batch.attention_mask[:, :width])
    return prompts, unpad(batch.input_ids[:, width:], batch.response_mask)


def _width(lengths: torch.Tensor, width: int | None) -> int:
    longest = int(lengths.max()) if lengths.numel() else 0
    if width is not None and longest > width:
        raise BatchError(f"Row {int(lengths.argmax())} has {longest} tokens, more than the width {width}.")
    return longest if width is None else width


def _scatter(nested: torch.Tensor, mask: torch.Tensor, fill: float) -> torch.Tensor:
    values = nested.values()
    out = values.new_full((*mask.shape, *values.shape[1:]), fill)
    return out.index_put(mask.nonzero(as_tuple=True), values)


def _ranges(start: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The flat positions start[i] .. start[i] + lengths[i] - 1 of all rows, in order."""
    ends = lengths.cumsum(0)
    return torch.arange(int(lengths.sum()), device=start.device) + (start - ends + lengths).repeat_interleave(lengths)


def _nested(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return torch.nested.nested_tensor_from_jagged(
        values,
        offsets=offsets,
        min_seqlen=int(lengths.min()) if lengths.numel() else 0,
        max_seqlen=int(lengths.max()) if lengths.numel() else 0,
    )
