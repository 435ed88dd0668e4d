"""Reads images of prompts with the image processor of a Hugging Face checkpoint folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoImageProcessor

from rl_protocol import ConfigError, RolloutError, SchemaError
from rl_protocol.ports import ImageInput
from rl_trainer.data.images import Vision, decoded


class FolderImageReader:
    """ImageReader of the model in `folder`, which is one of `rl_trainer.data.images.FAMILIES`.

    Pillow scales the images also where torchvision is installed, which scales otherwise: patches
    do not depend on the environment.

    Raises:
        ConfigError: its image processor can't be read.
    """

    def __init__(self, folder: Path, vision: Vision) -> None:
        self._vision = vision
        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(str(folder), local_files_only=True, backend="pil")
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"The image processor in {folder} can't be loaded: {error}") from error

    def __call__(self, paths: Sequence[str], prompt_ids: Sequence[int]) -> tuple[ImageInput, ...]:
        images = tuple(self._read(path) for path in paths)
        seen = sum(math.prod(image.grid_thw) for image in images) // self._vision.merge_size**2
        told = list(prompt_ids).count(self._vision.token)
        if seen != told:
            raise RolloutError(
                f"The images {', '.join(paths)} are {seen} tokens, and the prompt was made for {told}: a file has changed since. "
                "Empty open_files.cache_dir, so that prompts are prepared again."
            )
        return images

    def _read(self, path: str) -> ImageInput:
        try:
            image = decoded(Path(path).read_bytes(), path)
        except (OSError, SchemaError) as error:
            raise RolloutError(
                f"The image {path} can't be read: {error}. Bring it back, or leave its rows out."
            ) from error
        made = self._processor(images=[image], return_tensors="np")
        time, height, width = (int(number) for number in made["image_grid_thw"][0])
        return ImageInput(np.ascontiguousarray(made["pixel_values"], np.float32), (time, height, width))
