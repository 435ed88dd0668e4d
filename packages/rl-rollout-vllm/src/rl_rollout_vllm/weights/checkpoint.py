"""Read sizes, stop tokens and weight shapes of a Hugging Face folder, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import ConfigError, SchemaError
from rl_protocol.support.hf_checkpoint import safetensors_files, text_fields

EMBEDDING = "model.embed_tokens.weight"
VISION_EMBEDDING = "model.language_model.embed_tokens.weight"
HEAD = "lm_head.weight"
VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""`model_type` of the supported models that see images."""

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Element types of safetensors files -> those of WeightTensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """How a model sees images.

    Attributes:
        token: id of the token that stands for a piece of an image.
        patches: patches of a piece.
        never_generated: ids of the tokens that stand for pieces of images and videos.
    """

    token: int
    patches: int
    never_generated: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model as its folder describes it.

    Attributes:
        path: the folder.
        context: most tokens of prompt and response together.
        vocabulary: number of token ids.
        eos_ids: tokens that end a response.
        head_size: size of an attention head.
        tied: the output layer shares the embedding's weight, and the files lack `lm_head.weight`.
        shapes: name of each weight -> its shape.
        vision: how the model sees images; None: it does not.
    """

    path: Path
    context: int
    vocabulary: int
    eos_ids: tuple[int, ...]
    head_size: int
    tied: bool
    shapes: Mapping[str, tuple[int, ...]]
    vision: Vision | None = None

    @property
    def embedding(self) -> str:
        """Name of the weight of the embedding of tokens."""
        return EMBEDDING if self.vision is None else VISION_EMBEDDING

    def weight_name(self, name: str) -> str:
        """The name of a weight in a model of transformers, of its name there or in a file.

        Files of vision models have names of older versions of transformers.

        `model.norm.weight` of one is `model.language_model.norm.weight`, and `visual.x` is
        `model.visual.x`.
        """
        if self.vision is None or name.startswith(("model.language_model.", "model.visual.")):
            return name
        if name.startswith("visual."):
            return f"model.{name}"
        return f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read the description of the model in a folder.

    Raises:
        ConfigError: the folder or a file is missing or unreadable; names it.
    """
    folder = Path(path)
    whole = read_json(folder / "config.json")
    config = text_fields(whole)
    generation = read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    try:
        context, vocabulary = int(config["max_position_embeddings"]), int(config["vocab_size"])
        head_size = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder / 'config.json'} does not describe a causal language model: {error!r}.") from error
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = cast("list[int]", eos if isinstance(eos, list) else [] if eos is None else [eos])
    model = Checkpoint(
        path=folder.absolute(),
        context=context,
        vocabulary=vocabulary,
        eos_ids=tuple(ids),
        head_size=head_size,
        tied=bool(config.get("tie_word_embeddings", False)),
        shapes={},
        vision=_vision(whole, folder),
    )
    shapes = {
        model.weight_name(name): tuple(entry["shape"])
        for file in safetensors_files(folder)
        for name, entry in _header(file)[0].items()
    }
    return replace(model, shapes=shapes)


def _vision(config: Mapping[str, Any], folder: Path) -> Vision | None:
    if config.get("model_type") not in VISION_FAMILIES:
        return None
    image, video = config.get("image_token_id"), config.get("video_token_id")
    merged = (config.get("vision_config") or {}).get("spatial_merge_size", 2)
    if not (isinstance(image, int) and isinstance(video, int) and isinstance(merged, int)):
        raise ConfigError(
            f"{folder / 'config.json'} does not describe a vision model: image_token_id, video_token_id and vision_config.spatial_merge_size "
            f"must be integers; got {image!r}, {video!r} and {merged!r}."
        )
    return Vision(token=image, patches=merged**2, never_generated=(image, video))


def require_shards(model: Mapping[str, Any], size: int) -> None:
    """Check that tensor parallelism can divide the attention heads of a model.

    Args:
        model: the fields of its config.json.
        size: number of processes.

    Raises:
        ConfigError: it can't.
    """
    fields = text_fields(model)
    heads = int(fields.get("num_attention_heads") or size)
    shared = int(fields.get("num_key_value_heads") or heads)
    if heads % size or (shared % size and size % shared):
        raise ConfigError(
            f"The model has {heads} attention heads and {shared} for keys and values, which can't be divided over {size} processes: change "
            "VLLMConfig.tensor_parallel_size."
        )


def read_tensors(file: Path) -> list[WeightTensor]:
    """Read all tensors of a safetensors file.

    Raises:
        ConfigError: it is missing or unreadable, or has elements of an unknown type.
    """
    entries, start = _header(file)
    data = np.fromfile(file, np.uint8, offset=start)
    tensors: list[WeightTensor] = []
    for name, entry in entries.items():
        if entry["dtype"] not in _DTYPES:
            raise ConfigError(f"{file}: tensor {name!r} has elements of the unknown type {entry['dtype']!r}.")
        begin, end = entry["data_offsets"]
        try:
            tensors.append(WeightTensor(name, _DTYPES[entry["dtype"]], tuple(entry["shape"]), data[begin:end]))
        except SchemaError as error:
            raise ConfigError(f"{file} is truncated or damaged: {error}") from error
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ConfigError: the file is missing or does not hold one.
    """
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}. Is {str(path.parent)!r} a Hugging Face folder?") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold a JSON object; got a {type(found).__name__}.")
    return cast("dict[str, Any]", found)


def _header(file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the entries of a safetensors file and the offset of its data."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > file.stat().st_size:
                raise ValueError("its header is longer than the file")
            entries: dict[str, dict[str, Any]] = json.loads(stream.read(length))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} can't be read as a safetensors file: {error}.") from error
    return {name: entry for name, entry in entries.items() if name != "__metadata__"}, 8 + length
