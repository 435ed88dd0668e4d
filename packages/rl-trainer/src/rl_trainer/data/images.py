"""Images of rows: parses and checks them, and computes how many tokens a model uses for each.

The only module of `rl_trainer.data` that imports Pillow (extra `images`), and only if there is an
image. Models of the Qwen-VL families cut an image into patches, whose number depends on its size
within bounds; one token stands for `merge_size`² patches.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rl_protocol import ConfigError, SchemaError

PLACEHOLDER = "<image>"
"""Marks an image in the text of a prompt, as in verl's data."""
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""`model_type` of the supported vision models."""
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files of a checkpoint folder; either one holds the settings of the image processor."""
MOST_PIXELS = 1 << 26
"""Limit for an image before the model's processor scales it down: 8192 x 8192."""
MOST_BYTES = 1 << 28
"""Limit for its file."""
MOST_ASPECT = 200
"""Limit for longer side / shorter side, as in transformers."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image of a row: bytes or a path."""

    data: bytes | None
    path: str


@dataclass(frozen=True, slots=True)
class CheckedImage:
    """An image that can be decoded."""

    name: str
    """Absolute path; for an image given as bytes, a hash of its content."""
    data: bytes | None
    """None if the image is the file `name`."""
    width: int
    height: int


def parse_images(raw: object) -> tuple[ImageSource, ...] | None:
    """The images of a row's column `images`; None if the column is null.

    Each image is {"bytes": .., "path": ..} as Hugging Face's Image feature stores it,
    {"image": path or data URL}, or such a string.

    Raises:
        SchemaError: an image has none of these forms. The message names it.
    """
    if raw is None:
        return None
    if not isinstance(raw, Sequence) or isinstance(raw, str | bytes):
        raise SchemaError(f"images must be a list; got {type(raw).__name__}")
    return tuple(_source(number, one) for number, one in enumerate(cast("Sequence[object]", raw), 1))


def _source(number: int, raw: object) -> ImageSource:
    fields = cast("Mapping[str, object]", raw) if isinstance(raw, Mapping) else {"image": raw}
    data, path = fields.get("bytes"), fields.get("image") or fields.get("path")
    if isinstance(data, bytes):
        return ImageSource(data, "")
    if data is not None or not isinstance(path, str):
        raise SchemaError(
            f'image {number} must be {{"bytes": .., "path": ..}}, {{"image": path or data URL}} or a path; got {str(raw)[:80]!r}'
        )
    if path.startswith("data:"):
        return ImageSource(_data_url(number, path), "")
    if re.match(r"(?!file:)\w+://", path):
        raise SchemaError(f"image {number} is {path[:80]!r}; images are read from files and data URLs, never fetched")
    if "\0" in path:
        raise SchemaError(f"image {number} is {path[:80]!r}; no path has a null byte")
    return ImageSource(None, path.removeprefix("file://"))


def _data_url(number: int, url: str) -> bytes:
    head, comma, body = url.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("it does not begin with data:<type>;base64,")
        return base64.b64decode(body, validate=True)
    except (ValueError, binascii.Error) as error:
        raise SchemaError(f"image {number} is a data URL that can't be read: {error}") from error


def check_images(sources: Sequence[ImageSource], folder: Path, text: str) -> list[CheckedImage]:
    """Read and decode every image of a row once.

    Args:
        sources: images of the row.
        folder: base of relative paths.
        text: of the prompt, which contains PLACEHOLDER once per image.

    Raises:
        SchemaError: the number of images differs from that of the placeholders, or an image is
            missing, invalid or too large. The message names it.
        ConfigError: Pillow is not installed.
    """
    placeholders = text.count(PLACEHOLDER)
    if placeholders != len(sources):
        raise SchemaError(
            f"the prompt must contain {PLACEHOLDER} once for each image; it does so {placeholders} times, images: {len(sources)}"
        )
    return [_checked(number, source, folder) for number, source in enumerate(sources, 1)]


def _checked(number: int, source: ImageSource, folder: Path) -> CheckedImage:
    path = _path(number, source, folder)
    what = f"image {number}" if source.data is not None else f"image {number} ({path})"
    try:
        size = path.stat().st_size if source.data is None else len(source.data)
        if size > MOST_BYTES:
            raise SchemaError(f"{what} has {size} bytes, more than {MOST_BYTES}")
        data = path.read_bytes() if source.data is None else source.data
    except OSError as error:
        raise SchemaError(f"{what} can't be read: {error.strerror}") from error
    width, height = decoded(data, what).size
    if source.data is None:
        return CheckedImage(str(path.resolve()), None, width, height)
    return CheckedImage(hashlib.sha256(data).hexdigest(), data, width, height)


def _path(number: int, source: ImageSource, folder: Path) -> Path:
    try:
        return folder / Path(source.path).expanduser()
    except RuntimeError as error:
        raise SchemaError(f"image {number} is {source.path[:80]!r}, and that user has no home directory") from error


def decoded(data: bytes, what: str) -> Any:
    """Decode an image completely, with Pillow.

    Args:
        data: the encoded image.
        what: name of the image, for messages.

    Raises:
        SchemaError: it is not an image in one of FORMATS, is truncated or too large.
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image  # extra `images`
    except ImportError as error:
        raise ConfigError("Rows with images need Pillow: install rl-trainer[images].") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata, and sizes, which are checked below
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise SchemaError(f"{what} has {width} x {height} pixels, more than {MOST_PIXELS}")
            if max(width, height) > MOST_ASPECT * min(width, height):
                raise SchemaError(
                    f"{what} has {width} x {height} pixels, one side more than {MOST_ASPECT} times the other"
                )
            image.load()
    except SchemaError:  # is also a ValueError
        raise
    except Image.DecompressionBombError as error:
        raise SchemaError(f"{what} has more than {MOST_PIXELS} pixels") from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:  # from decoders of damaged files
        raise SchemaError(f"{what} is not a whole image ({', '.join(FORMATS)}): {error}") from error
    return image


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """Settings of a model's image processor that determine how many tokens an image becomes."""

    token: int
    """Id of the token that stands for a piece of an image."""
    patch_size: int
    """Pixels."""
    temporal_patch_size: int = 2
    """Frames of a patch; an image is repeated for each."""
    merge_size: int
    """Patches along each side of the piece."""
    min_pixels: int
    max_pixels: int

    @classmethod
    def load(cls, folder: Path) -> Vision | str:
        """The settings in a checkpoint folder, or the reason why its model can't read images.

        Raises:
            ConfigError: a file of the folder can't be read, or lacks settings.
        """
        config = _json(folder / "config.json")
        classes = config.get("architectures")
        name = f"{folder} ({', '.join(map(str, classes)) if isinstance(classes, list) else 'a model without a name'})"
        if "vision_config" not in config:
            return f"{name} reads only text"
        if config.get("model_type") not in FAMILIES:
            return f"{name} is not a model of {', '.join(FAMILIES)}, the supported families of vision models"
        alone, whole = (_json(folder / name) for name in PROCESSORS)
        processor = alone or whole.get("image_processor")
        if not processor:
            raise ConfigError(
                f"{name} has no preprocessor_config.json with the settings of its image processor; save the model with its image processor."
            )
        size = processor.get("size") or {}
        return cls(
            token=int(config["image_token_id"]),
            patch_size=int(processor.get("patch_size", 14)),
            temporal_patch_size=int(processor.get("temporal_patch_size", 2)),
            merge_size=int(processor.get("merge_size", 2)),
            min_pixels=int(processor.get("min_pixels") or size.get("shortest_edge") or 56 * 56),
            max_pixels=int(processor.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280),
        )

    @property
    def most_tokens(self) -> int:
        """Number of tokens of an image of `max_pixels`."""
        return max(1, self.max_pixels // (self.patch_size * self.merge_size) ** 2)

    @property
    def token_bytes(self) -> int:
        """Bytes of the float32 pixels of a token: three colours of each patch."""
        return 4 * 3 * self.temporal_patch_size * (self.patch_size * self.merge_size) ** 2

    def tokens(self, width: int, height: int) -> int:
        """Number of tokens of an image of this size in pixels."""
        unit = self.patch_size * self.merge_size
        high, wide = round(height / unit) * unit, round(width / unit) * unit
        if high * wide > self.max_pixels:
            beta = math.sqrt(height * width / self.max_pixels)
            high, wide = (max(unit, math.floor(side / beta / unit) * unit) for side in (height, width))
        elif high * wide < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (height * width))
            high, wide = (math.ceil(side * beta / unit) * unit for side in (height, width))
        return high // unit * (wide // unit)

    def expand(self, ids: Sequence[int], counts: Sequence[int]) -> list[int]:
        """The prompt with the token of image i repeated counts[i] times.

        Raises:
            SchemaError: the chat template did not write the token once per image.
        """
        written = sum(one == self.token for one in ids)
        if written != len(counts):
            raise SchemaError(
                f"the chat template must write one image token for each image; tokens: {written}, images: {len(counts)}"
            )
        left, out = iter(counts), list[int]()
        for one in ids:
            out += [one] * next(left) if one == self.token else [one]
        return out


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}.") from error
