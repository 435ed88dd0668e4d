"""Where the images of a prompt are in its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from rl_protocol.counted import counted
from rl_protocol.errors import RolloutError
from rl_protocol.ports import GenerationRequest, ImageInput
from rl_rollout_vllm.weights.checkpoint import Vision


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """An image, and the tokens of the prompt that stand for it.

    Attributes:
        image: its patches.
        offset: place of its first token in the prompt.
        length: number of its tokens.
    """

    image: ImageInput
    offset: int
    length: int

    @property
    def digest(self) -> str:
        """Digest of its patches and their grid, in hex: equal images have equal keys and values."""
        digest = xxhash.xxh3_128(np.ascontiguousarray(self.image.pixel_values).view(np.uint8).data)
        digest.update(repr(tuple(self.image.grid_thw)).encode())
        return digest.hexdigest()


def check_images(request: GenerationRequest, vision: Vision | None, name: str) -> None:
    """Check that the prompt has as many image tokens as its images are.

    Raises:
        RolloutError: it has not, or the model sees no images; begins with `name`.
    """
    if vision is None:
        if request.images:
            raise RolloutError(f"{name}: it has images, and the model of this engine sees none.")
        return
    told, seen = request.prompt_ids.count(vision.token), sum(_tokens(image, vision) for image in request.images)
    if told != seen:
        raise RolloutError(
            f"{name}: the prompt has {counted(told, 'image token')}, and its {counted(len(request.images), 'image')} must have {seen}; "
            "a context must begin with the prompt of its row."
        )


def placed_images(prompt_ids: Sequence[int], images: Sequence[ImageInput], vision: Vision) -> tuple[PlacedImage, ...]:
    """Find the images in a prompt that `check_images` accepts, each at the next image token.

    Tokens of different images may follow each other.
    """
    placed, end = list[PlacedImage](), 0
    for image in images:
        offset, length = prompt_ids.index(vision.token, end), _tokens(image, vision)
        placed.append(PlacedImage(image, offset, length))
        end = offset + length
    return tuple(placed)


def _tokens(image: ImageInput, vision: Vision) -> int:
    return math.prod(image.grid_thw) // vision.patches
