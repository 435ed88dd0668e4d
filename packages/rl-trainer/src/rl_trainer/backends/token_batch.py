"""Batches prompts and responses for transformers models, and reads response tokens back."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from rl_protocol import BatchData
from rl_protocol.batch.columns import AnyArray
from rl_protocol.batch.packed_arrays import SHAPES_SUFFIX
from rl_protocol.kept_tokens import KeptTokens
from rl_protocol.padding import pad_sequences
from rl_protocol.rl_columns import GRIDS, PATCHES
from rl_protocol.routed_tokens import experts_at_places, experts_of
from rl_trainer.algorithms.arrays import IntArray
from rl_trainer.algorithms.losses.policy_objective import TokenColumns
from rl_trainer.algorithms.losses.value_loss import ValueColumns
from rl_trainer.algorithms.old_log_prob import INTERPOLATION
from rl_trainer.backends.packing import PackedLayout, TokenNumbers
from rl_trainer.backends.world import CPU
from rl_trainer.data.image_columns import check_responses

SHARED_FROM = 16
"""Tokens of a packed batch of which sharing prompts must save one."""


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """N trajectories as model input, and where the output predicts the T response tokens.

    `position[k]` is the place whose output predicts response token k: one before the token (the
    shift by one).
    """

    inputs: dict[str, Any]
    """Model arguments: right-padded [N, L], or packed [1, tokens]."""
    line: torch.Tensor
    """int64 [T], input row of each token: its trajectory; 0 if packed."""
    position: torch.Tensor
    """int64 [T], place in that row."""
    row: torch.Tensor
    """int64 [T], trajectory of each response token."""
    rows: int
    """N."""
    targets: torch.Tensor
    """int64 [T], the response tokens."""
    first: int
    """The first place that is read; outputs before it are not needed."""
    kept: KeptTokens | None = None
    """The tokens from which each response token was sampled; None: from all."""
    routed: torch.Tensor | None = None
    """int64 [places of the input, layers, K], the experts at each place; -1: the router chooses.
    None: it does so everywhere."""

    sources: IntArray | None = None
    """int64 [N, longest], the place in a packed input of each token; None: padded."""

    def places(self) -> IntArray:
        """int64 [N, longest], the place in the flattened input of each token of the rows."""
        if self.sources is not None:
            return self.sources
        width = self.inputs["input_ids"].shape[1]
        return np.arange(self.rows * width).reshape(self.rows, width)

    def read(self, output: torch.Tensor, first: int = 0) -> torch.Tensor:
        """[T, ...] of the model's output for every place from `first` on, [rows, places, ...]."""
        places = output.shape[1]
        return output.flatten(0, 1).index_select(0, self.line * places + self.position - first)


def token_batch(
    batch: BatchData,
    pad_id: int,
    *,
    packed: bool = False,
    device: torch.device = CPU,
    image_token: int | None = None,
    pieces: int = 0,
    blank: int = 0,
    multiple: int = 1,
) -> TokenBatch:
    """Join `prompts` and `responses` of every row, with the images of the prompts.

    Args:
        batch: `prompts`, `responses`; for a model with images also IMAGE_COLUMNS; where top-p or
            top-k excluded tokens also KEPT_COLUMNS; where experts are replayed also ROUTED_COLUMNS.
        pad_id: padding token.
        packed: join sequences end to end, without their last tokens, whose outputs are not read.
            Rows may share the tokens and images of equal prompts.
        device: of the model.
        image_token: placeholder of an image; None: the model reads text only.
        pieces: patches per placeholder.
        blank: numbers of a patch: a batch without images gets a further sequence with a blank
            image, which is not read; 0: it gets none.
        multiple: of which a packed input should have a number of tokens.

    Raises:
        BatchError: a prompt is empty, so nothing would predict the first response token; or a
            response contains an image token.
    """
    prompts, responses = batch.ragged("prompts"), batch.ragged("responses")
    joined = pad_sequences(prompts, responses, fill=pad_id)
    place, line = joined.place, joined.row
    experts, sources = experts_at_places(batch, joined.ids.shape[1]), None
    seen = None if image_token is None else _Images.of(batch, image_token, pieces)
    if seen is not None and blank and not len(seen.grids):
        seen = seen.with_blank(blank)
    if packed:
        # a copy of a placeholder would need an image
        tokens = packed_tokens(batch, multiple=multiple) if seen is None else packed_tokens(batch, further=seen.further)
        sources = tokens.at
        place = torch.from_numpy(tokens.at)[joined.row, joined.place]
        line = torch.zeros_like(joined.row)
        inputs = _packed_inputs(joined.ids, tokens, seen, device)
        if experts is not None:
            experts = experts[:, : tokens.at.shape[1]].reshape(-1, *experts.shape[2:])[tokens.first]
    else:
        inputs = _padded_inputs(joined.ids, joined.real, seen, device)
        experts = None if experts is None else experts.reshape(-1, *experts.shape[2:])
    return TokenBatch(
        inputs=inputs,
        line=line.to(device),
        position=place.to(device),
        row=joined.row.to(device),
        rows=len(batch),
        targets=joined.targets.to(device),
        first=int(place.numpy().min(initial=int(prompts.lengths.max(initial=0)))),
        kept=KeptTokens.of(batch, device),
        routed=None if experts is None else torch.from_numpy(experts).to(device, torch.int64),
        sources=sources,
    )


def _padded_inputs(
    ids: torch.Tensor, real: torch.Tensor, seen: _Images | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """Model arguments of right-padded sequences [N, L], of which the tokens are `real`."""
    mask, images = real.long(), dict[str, torch.Tensor]()
    if seen is not None:
        ids, rows = seen.extended(ids), len(ids)
        mask = torch.nn.functional.pad(mask, (0, 0, 0, seen.further))
        mask[rows:, 0] = 1
        images = seen.arguments(device)
        if images:
            images["mm_token_type_ids"] = (ids == seen.token).int().to(device)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), **images}


def _packed_inputs(
    ids: torch.Tensor, tokens: TokenNumbers, seen: _Images | None, device: torch.device
) -> dict[str, Any]:
    """Model arguments of the sequences [N, L], joined end to end."""
    longest, first, images = tokens.at.shape[1], torch.from_numpy(tokens.first), dict[str, torch.Tensor]()
    ids, positions = ids[:, :longest], (first % longest)[None]
    if seen is not None:
        ids = seen.extended(ids)
        positions = torch.from_numpy(seen.positions(ids.numpy())).flatten(1)[:, first][:, None]
        images = seen.of_owners(tokens).arguments(device)
    return {
        "input_ids": ids.flatten()[first][None].to(device),
        "position_ids": positions.to(device),
        "layout": PackedLayout.of(tokens).to(device),
        **images,
    }


def packed_tokens(batch: BatchData, further: int = 0, multiple: int = 1) -> TokenNumbers:
    """Number the tokens of `prompts` and `responses`, without the last token of each response.

    Rows with equal prompts, whose tokens have the same experts and images, share the tokens of the
    prompt if that saves at least one token in SHARED_FROM; sequences of equal length that share
    nothing need no copies in attention. After the rows there are `further` sequences of one token,
    and then copies of a token until the number of all is a multiple of `multiple`.
    """
    prompts, lengths = batch.ragged("prompts"), lengths_of(batch) - (batch.ragged("responses").lengths > 0)
    first: dict[tuple[bytes, ...], int] = {}
    spans, experts = pairwise(prompts.offsets.tolist()), experts_of(batch)
    routed = [b"" if experts is None else experts[i][:size].tobytes() for i, size in enumerate(prompts.lengths)]
    images = [b""] * len(batch)
    if PATCHES in batch:
        images = [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in batch.ragged(PATCHES).rows()]
    names = [(prompts.values[a:b].tobytes(), routed[i], images[i]) for i, (a, b) in enumerate(spans)]
    owner = np.array([first.setdefault(name, i) for i, name in enumerate(names)], np.int64)
    saved = prompts.lengths[owner != np.arange(len(owner))].sum()
    if saved * SHARED_FROM < lengths.sum():
        owner = np.arange(len(owner))
    alone = np.ones(further, np.int64)
    return TokenNumbers.of(
        np.concatenate([lengths, alone]),
        np.concatenate([owner, len(owner) + np.arange(further)]),
        np.concatenate([prompts.lengths, alone]),
        multiple,
    )


@dataclass(frozen=True, kw_only=True)
class _Images:
    """The images of the rows of a batch.

    Attributes:
        token: placeholder of an image.
        pieces: patches per placeholder.
        counts: int64 [N], images of each row.
        grids: int64 [images, 3], patches in time, height and width.
        patches: float32 [all patches, numbers of a patch].
        further: 1 if the last image is a blank one in a sequence after the rows, else 0.
    """

    token: int
    pieces: int
    counts: IntArray
    grids: IntArray
    patches: AnyArray
    further: int = 0

    @classmethod
    def of(cls, batch: BatchData, token: int, pieces: int) -> _Images:
        check_responses(batch, token)
        grids, shapes = batch.ragged(GRIDS), batch.ragged(PATCHES + SHAPES_SUFFIX).values
        (depth,) = {int(one) for one in shapes[:, 1]} or {0}
        patches: AnyArray = batch.ragged(PATCHES).values.reshape(-1, depth) if depth else np.zeros((0, 0), np.float32)
        return cls(token=token, pieces=pieces, counts=grids.lengths, grids=grids.values, patches=patches)

    def with_blank(self, numbers: int) -> _Images:
        """With a blank image of one placeholder, in a sequence of its own."""
        side = math.isqrt(self.pieces)
        return replace(
            self,
            counts=np.append(self.counts, 1),
            grids=np.array([[1, side, side]], np.int64),
            patches=np.zeros((self.pieces, numbers), np.float32),
            further=1,
        )

    def extended(self, ids: torch.Tensor) -> torch.Tensor:
        """[N + further, L] the token ids [N, L] of the rows, with those of the further sequence."""
        more = torch.nn.functional.pad(ids, (0, 0, 0, self.further))
        more[len(ids) :, 0] = self.token
        return more

    def of_owners(self, tokens: TokenNumbers) -> _Images:
        """Without those of rows that share the tokens of a row before them."""
        own = tokens.first[tokens.at[:, 0]] // tokens.at.shape[1] == np.arange(len(tokens.at))
        images = np.repeat(own, self.counts)
        patches = np.repeat(images, self.grids.prod(1))
        return replace(
            self, counts=np.where(own, self.counts, 0), grids=self.grids[images], patches=self.patches[patches]
        )

    def positions(self, ids: IntArray) -> IntArray:
        """int64 [3, N, L] the positions in time, height and width of tokens [N, L] (M-RoPE,
        arXiv:2409.12191, section 2.1).

        Text has equal ones. An image begins after the largest so far, and the text behind it after
        its largest.
        """
        positions, left, merged = (
            np.empty((3, *ids.shape), np.int64),
            iter(self.grids.tolist()),
            math.isqrt(self.pieces),
        )
        for row, line in enumerate(ids):
            at = begin = 0
            shown = line == self.token
            while at < len(line):
                if shown[at]:
                    time, high, wide = next(left)
                    grid = time, high // merged, wide // merged
                    end, size = at + math.prod(grid), max(grid)
                    places = np.indices(grid).reshape(3, -1)
                else:
                    size = int(shown[at:].argmax()) if shown[at:].any() else len(line) - at
                    end = at + size
                    places = np.arange(size)
                positions[:, row, at:end] = begin + places
                at, begin = end, begin + size
        return positions

    def arguments(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Arguments of a model; none without an image."""
        if not len(self.grids):
            return {}
        return {
            "pixel_values": torch.tensor(self.patches, device=device),
            "image_grid_thw": torch.tensor(self.grids, device=device),
        }


def image_inputs(patches: AnyArray, grids: AnyArray, ids: IntArray, token: int) -> dict[str, torch.Tensor]:
    """Image arguments of a model of the Qwen2-VL family.

    Args:
        patches: float32 [all patches, numbers per patch] of all images, in row order.
        grids: int64 [images, 3].
        ids: [N, L]; ids equal to `token` stand for the images.
        token: placeholder of an image.
    """
    return {
        "pixel_values": torch.tensor(patches),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": torch.from_numpy((ids == token).astype(np.int32)),
    }


def flat(batch: BatchData, name: str, device: torch.device = CPU) -> torch.Tensor:
    """A ragged float column as a flat float32 tensor [T]."""
    values: AnyArray = batch.ragged(name).values
    return torch.tensor(values, dtype=torch.float32, device=device)


def ids(batch: BatchData, name: str, device: torch.device = CPU) -> torch.Tensor:
    """A ragged column of token ids as a flat int64 tensor."""
    return torch.tensor(batch.ragged(name).values, dtype=torch.int64, device=device)


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
    """The columns of the policy loss; `row` int64 [T] is the trajectory of each response token."""

    def wide(values: torch.Tensor) -> torch.Tensor:
        return values.view(len(row), values.numel() // max(len(row), 1))

    def optional(name: str) -> torch.Tensor | None:
        return flat(micro, name, row.device) if name in micro else None

    return TokenColumns(
        old_log_prob=optional("old_log_probs"),
        advantages=optional("advantages"),
        mask=mask_of(micro, row.device),
        row=row,
        rows=len(micro),
        ref_log_prob=optional("ref_log_prob"),
        weights=optional("rollout_is_weights"),
        chosen=flag(micro, "chosen_tokens", row.device) if "chosen_tokens" in micro else None,
        interpolation=optional(INTERPOLATION),
        rl_weights=optional("rl_weights"),
        ce_weights=optional("ce_weights"),
        ref_kl_weights=optional("ref_kl_weights"),
        ref_top_log_probs=wide(flat(micro, "ref_top_log_probs", row.device)) if "ref_top_log_probs" in micro else None,
        top_tokens=wide(ids(micro, "ref_top_tokens", row.device)) if "ref_top_tokens" in micro else None,
    )


def value_columns(micro: BatchData, row: torch.Tensor) -> ValueColumns:
    """The columns of the value loss; `row` as in `token_columns`."""
    return ValueColumns(
        values=flat(micro, "values", row.device),
        returns=flat(micro, "returns", row.device),
        mask=mask_of(micro, row.device),
        row=row,
        rows=len(micro),
    )
