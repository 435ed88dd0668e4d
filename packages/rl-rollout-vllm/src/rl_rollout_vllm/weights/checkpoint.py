"""Read sizes, stop tokens and weight shapes of a Hugging Face folder, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import ConfigError
from rl_protocol.support.hf_checkpoint import safetensors_files

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

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
    """

    path: Path
    context: int
    vocabulary: int
    eos_ids: tuple[int, ...]
    head_size: int
    tied: bool
    shapes: Mapping[str, tuple[int, ...]]


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read the description of the model in a folder.

    Raises:
        ConfigError: the folder or a file is missing or unreadable; names it.
    """
    folder = Path(path)
    config = read_json(folder / "config.json")
    generation = read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    try:
        context, vocabulary = int(config["max_position_embeddings"]), int(config["vocab_size"])
        head_size = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder / 'config.json'} does not describe a causal language model: {error!r}.") from error
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = cast("list[int]", eos if isinstance(eos, list) else [] if eos is None else [eos])
    return Checkpoint(
        path=folder.absolute(),
        context=context,
        vocabulary=vocabulary,
        eos_ids=tuple(ids),
        head_size=head_size,
        tied=bool(config.get("tie_word_embeddings", False)),
        shapes={
            name: tuple(entry["shape"])
            for file in safetensors_files(folder)
            for name, entry in _header(file)[0].items()
        },
    )


def require_shards(model: Mapping[str, Any], size: int) -> None:
    """Check that tensor parallelism can divide the attention heads of a model.

    Args:
        model: the fields of its config.json.
        size: number of processes.

    Raises:
        ConfigError: it can't.
    """
    heads = int(model.get("num_attention_heads") or size)
    shared = int(model.get("num_key_value_heads") or heads)
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
        tensors.append(WeightTensor(name, _DTYPES[entry["dtype"]], tuple(entry["shape"]), data[begin:end]))
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
