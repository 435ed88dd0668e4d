"""Read the headers of a model's safetensors files, and compare them with config.json.

Imports no torch: a header is JSON with the name, the shape and the place of each tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rl_app_ppo.config.model_path import weight_files
from rl_protocol import ConfigError
from rl_protocol.errors import UNREADABLE
from rl_protocol.support.hf_checkpoint import text_fields
from rl_trainer.data.images import FAMILIES
from rl_trainer.data.model_families import JOINED_FAMILIES

_LONGEST_HEADER = 100_000_000
_METADATA = "__metadata__"
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_EMBEDDINGS = re.compile(r"(.*\.)?embed_tokens\.weight")


class _Tensor(msgspec.Struct, frozen=True):
    """One entry of a header; other fields are ignored."""

    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def weight_shapes(model: Path) -> dict[str, Sequence[int]]:
    """Name of each tensor in a checkpoint folder -> its shape.

    Raises:
        ConfigError: a file can't be read, or is not as long as its header says.
    """
    return {
        name: tensor.shape for path in weight_files(model, str(model)) for name, tensor in _header(path, model).items()
    }


def check_weights(model: Path, described: Mapping[str, Any]) -> None:
    """Check that the weights have the layers and the embeddings of `described`, the config.json.

    Models of other families than JOINED_FAMILIES and FAMILIES, which may name or share layers in
    another way, are compared when a worker loads them.

    Raises:
        ConfigError: a layer lacks, or the embeddings have another shape; or see `weight_shapes`.
    """
    shapes = weight_shapes(model)
    if described.get("model_type") not in (*JOINED_FAMILIES, *FAMILIES):
        return
    sizes = text_fields(described)
    held = {int(match[1]) for name in shapes if (match := _LAYER.search(name))}
    layers = sizes.get("num_hidden_layers")
    if held and isinstance(layers, int) and (missing := sorted(set(range(layers)) - held)):
        raise ConfigError(
            f"model.path={str(model)!r}: its weights lack {len(missing)} of the {layers} layers that config.json names, such as layer "
            f"{missing[0]}. Copy or download the folder again."
        )
    wanted = (sizes.get("vocab_size"), sizes.get("hidden_size"))
    for name, shape in shapes.items():
        if _EMBEDDINGS.fullmatch(name) and None not in wanted and tuple(shape) != wanted:
            raise ConfigError(
                f"model.path={str(model)!r}: {name} has the shape {list(shape)}, and config.json says {list(wanted)} (vocab_size, hidden_size). "
                "Copy or download the folder again."
            )


def _header(path: Path, model: Path) -> dict[str, _Tensor]:
    """The tensors of a file by name."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entries = msgspec.json.decode(file.read(min(size, _LONGEST_HEADER)), type=dict[str, msgspec.Raw])
        tensors = {
            name: msgspec.json.decode(entry, type=_Tensor) for name, entry in entries.items() if name != _METADATA
        }
        held = path.stat().st_size
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"model.path={str(model)!r}: {path.name} is no readable safetensors file: {error}") from error
    whole = 8 + size + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if held != whole:
        raise ConfigError(
            f"model.path={str(model)!r}: {path.name} has {held} bytes, and its header says {whole}. Copy or download the folder again."
        )
    return tensors
