"""From ragged prompts and responses to what a transformers model takes, and back to flat response tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rl_protocol import BatchData, BatchError
from rl_protocol.arrays import SHAPES_SUFFIX
from rl_protocol.columns import AnyArray
from rl_protocol.rl_columns import GRIDS, PATCHES
from rl_trainer.algorithms.episodes import IntArray
from rl_trainer.algorithms.losses import TokenColumns, ValueColumns
from rl_trainer.pixels import check_responses

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """N trajectories as the model takes them, and where in its output the T response tokens are predicted.

    `position[k]` is the place whose output predicts response token k: one before the token itself (the left shift by one).
    """

    inputs: dict[str, Any]
    """Arguments of the model: right-padded [N, L], or packed [1, sum of lengths]."""
    line: torch.Tensor
    """int64 [T], line of the input that holds the token: its trajectory; 0 when packed."""
    position: torch.Tensor
    """int64 [T], place in that line."""
    row: torch.Tensor
    """int64 [T], trajectory of each response token."""
    rows: int
    """N."""
    targets: torch.Tensor
    """int64 [T], the response tokens."""
    first: int
    """The earliest of the places: what the model puts out before it is read by nobody."""

    def read(self, output: torch.Tensor, first: int = 0) -> torch.Tensor:
        """[T, ...] of what the model put out at every place from `first` on, [lines, places, ...]."""
        places = output.shape[1]
        return output.flatten(0, 1).index_select(0, self.line * places + self.position - first)


def token_batch(
    batch: BatchData,
    pad_id: int,
    *,
    packed: bool = False,
    device: torch.device = CPU,
    image_token: int | None = None,
) -> TokenBatch:
    """Join `prompts` and `responses` of every row, with the images of their prompts where there are any.

    Args:
        batch: `prompts`, `responses`; for a model that sees images IMAGE_COLUMNS.
        pad_id: what stands where a line is shorter than the longest.
        packed: join sequences end to end; no images then.
        device: of the model.
        image_token: what stands for a piece of an image; None: the model reads text alone.

    Raises:
        BatchError: an empty prompt: nothing would predict the first response token; an image token in a response.
    """
    prompts, responses = batch.ragged("prompts"), batch.ragged("responses")
    p, r = prompts.lengths, responses.lengths
    if (p == 0).any():
        raise BatchError(f"Row {int(np.argmin(p))} has an empty prompt; every prompt needs at least one token.")
    row = np.repeat(np.arange(len(batch)), r)
    within = np.arange(responses.values.shape[0]) - np.repeat(responses.offsets[:-1], r)
    place = np.repeat(p, r) + within - 1
    ids, real = _padded(prompts.values, responses.values, p, r, pad_id)
    inputs: dict[str, Any]
    if packed:
        starts = np.concatenate([[0], np.cumsum(p + r)])
        place, line = place + np.repeat(starts[:-1], r), np.zeros_like(row)
        inputs = {
            "input_ids": torch.from_numpy(ids[real][None]).to(device),
            "position_ids": torch.from_numpy((np.arange(starts[-1]) - np.repeat(starts[:-1], p + r))[None]).to(device),
            "cu_seq_lens_q": torch.from_numpy(starts).to(device),
            "max_length_q": int((p + r).max(initial=1)),
        }
    else:
        line = row
        inputs = {
            "input_ids": torch.from_numpy(ids).to(device),
            "attention_mask": torch.from_numpy(real.astype(np.int64)).to(device),
            **({} if image_token is None else _images(batch, ids, image_token, device)),
        }
    return TokenBatch(
        inputs=inputs,
        line=torch.from_numpy(line).to(device),
        position=torch.from_numpy(place).to(device),
        row=torch.from_numpy(row).to(device),
        rows=len(batch),
        targets=torch.tensor(responses.values, dtype=torch.int64, device=device),
        first=int(place.min(initial=int(p.max(initial=0)))),
    )


def _images(batch: BatchData, ids: IntArray, token: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Arguments of the model for the images of all rows; nothing where there are none."""
    check_responses(batch, token)
    grids = batch.ragged(GRIDS).values
    if not len(grids):
        return {}
    (depth,) = {int(one) for one in batch.ragged(PATCHES + SHAPES_SUFFIX).values[:, 1]}
    patches: AnyArray = batch.ragged(PATCHES).values.reshape(-1, depth)
    return image_inputs(patches, grids, ids, token, device)


def image_inputs(
    patches: AnyArray, grids: AnyArray, ids: IntArray, token: int, device: torch.device = CPU
) -> dict[str, torch.Tensor]:
    """Arguments of a model of the Qwen2-VL family.

    Args:
        patches: float32 [all patches, numbers of a patch] of all images, in the order of the lines.
        grids: int64 [images, 3].
        ids: [N, L] of which those that are `token` stand for the images.
        token: as above.
        device: of the model.
    """
    return {
        "pixel_values": torch.tensor(patches, device=device),
        "image_grid_thw": torch.tensor(grids, device=device),
        "mm_token_type_ids": torch.from_numpy((ids == token).astype(np.int32)).to(device),
    }


def _padded(
    prompts: AnyArray, responses: AnyArray, p: IntArray, r: IntArray, pad_id: int
) -> tuple[IntArray, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Right-padded ids [N, L] and which of them are real."""
    width = int((p + r).max(initial=1))
    ids = np.full((p.size, width), pad_id, dtype=np.int64)
    columns = np.arange(width)[None, :]
    ids[columns < p[:, None]] = prompts
    ids[(columns >= p[:, None]) & (columns < (p + r)[:, None])] = responses
    return ids, columns < (p + r)[:, None]


def flat(batch: BatchData, name: str, device: torch.device = CPU) -> torch.Tensor:
    """A ragged float column as a flat float32 tensor [T]."""
    values: AnyArray = batch.ragged(name).values
    return torch.tensor(values, dtype=torch.float32, device=device)


def flag(batch: BatchData, name: str, device: torch.device = CPU) -> torch.Tensor:
    """A ragged bool column as a flat bool tensor [T]."""
    return torch.tensor(batch.ragged(name).values, dtype=torch.bool, device=device)


def mask_of(batch: BatchData, device: torch.device = CPU) -> torch.Tensor:
    """`response_mask` as a flat bool tensor [T]."""
    return flag(batch, "response_mask", device)


def lengths_of(batch: BatchData) -> IntArray:
    """[N] tokens of each row, prompt and response."""
    return batch.ragged("prompts").lengths + batch.ragged("responses").lengths


def token_columns(micro: BatchData, row: torch.Tensor) -> TokenColumns:
    """What the loss of the policy looks at; `row` int64 [T] is the trajectory of each response token, on the device of the rest."""

    def optional(name: str) -> torch.Tensor | None:
        return flat(micro, name, row.device) if name in micro else None

    return TokenColumns(
        old_log_prob=flat(micro, "old_log_probs", row.device),
        advantages=flat(micro, "advantages", row.device),
        mask=mask_of(micro, row.device),
        row=row,
        rows=len(micro),
        ref_log_prob=optional("ref_log_prob"),
        weights=optional("rollout_is_weights"),
        chosen=flag(micro, "chosen_tokens", row.device) if "chosen_tokens" in micro else None,
    )


def value_columns(micro: BatchData, row: torch.Tensor) -> ValueColumns:
    """What the loss of the value function looks at; `row` as in `token_columns`."""
    return ValueColumns(
        values=flat(micro, "values", row.device),
        returns=flat(micro, "returns", row.device),
        mask=mask_of(micro, row.device),
        row=row,
        rows=len(micro),
    )
