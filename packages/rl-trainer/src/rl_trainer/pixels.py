"""Images of prompts on their way through the data plane: columns of the prompt's row, stored once for all of its trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rl_protocol import BatchData, BatchError, Column, RaggedColumn, pack_arrays
from rl_protocol.columns import offsets_from_lengths
from rl_protocol.ports import ImageInput
from rl_protocol.rl_columns import GRIDS, PATCHES


class ImageReader(Protocol):
    """Makes of the images of a prompt what a policy is shown."""

    def __call__(self, paths: Sequence[str], prompt_ids: Sequence[int]) -> tuple[ImageInput, ...]:
        """One for each path. Called in a thread of its own, so that it may block.

        Raises:
            RolloutError: an image that can't be read, or is not of the size that the prompt was made for; names it.
        """
        ...


def image_columns(rows: Sequence[Sequence[ImageInput]]) -> dict[str, Column]:
    """IMAGE_COLUMNS of N prompts; rows may have no image."""
    pixels = pack_arrays(PATCHES, [[image.pixel_values for image in row] for row in rows], ndim=2, dtype="float32")
    grids = np.array([image.grid_thw for row in rows for image in row], np.int64).reshape(-1, 3)
    return {**pixels, GRIDS: RaggedColumn(grids, offsets_from_lengths([len(row) for row in rows]), "int64")}


def check_responses(batch: BatchData, token: int) -> None:
    """Refuse image tokens that no image is behind.

    Raises:
        BatchError: a response holds one; names the row.
    """
    responses = batch.ragged("responses")
    found = np.flatnonzero(responses.values == token)
    if found.size:
        row = int(np.searchsorted(responses.offsets, found[0], side="right")) - 1
        raise BatchError(
            f"Row {row} has the image token {token} in its response, where no image is; take special tokens out of what tools answer."
        )
