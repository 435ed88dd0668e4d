"""Images as columns of the prompt's row, stored once for all of its trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rl_protocol import BatchData, BatchError, Column, RaggedColumn, pack_arrays
from rl_protocol.batch.columns import offsets_from_lengths
from rl_protocol.ports import ImageInput
from rl_protocol.rl_columns import GRIDS, PATCHES


class ImageReader(Protocol):
    """Reads the images of a prompt into the inputs of a policy."""

    def __call__(self, paths: Sequence[str], prompt_ids: Sequence[int]) -> tuple[ImageInput, ...]:
        """One input per path. Called in a separate thread, so it may block.

        Raises:
            RolloutError: an image can't be read, or no longer has the size that the prompt was
                encoded for. The message names it.
        """
        ...


def image_columns(rows: Sequence[Sequence[ImageInput]]) -> dict[str, Column]:
    """IMAGE_COLUMNS of N prompts; a prompt may have no image."""
    pixels = pack_arrays(PATCHES, [[image.pixel_values for image in row] for row in rows], ndim=2, dtype="float32")
    grids = np.array([image.grid_thw for row in rows for image in row], np.int64).reshape(-1, 3)
    return {**pixels, GRIDS: RaggedColumn(grids, offsets_from_lengths([len(row) for row in rows]), "int64")}


def check_responses(batch: BatchData, token: int) -> None:
    """Check that responses contain no image token, because only prompts have images.

    Raises:
        BatchError: a response contains one. The message names the row.
    """
    responses = batch.ragged("responses")
    found = np.flatnonzero(responses.values == token)
    if found.size:
        row = int(np.searchsorted(responses.offsets, found[0], side="right")) - 1
        raise BatchError(
            f"Row {row} has the image token {token} in its response, which has no image; remove special tokens from the answers of tools."
        )
