"""Find the weight files of a Hugging Face checkpoint folder, and read its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rl_protocol.errors import UNREADABLE, ConfigError

INDEX = "model.safetensors.index.json"


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files, sorted by name: those listed in the index, or `model.safetensors`.

    Does not check that they exist.

    Raises:
        ConfigError: the index can't be read, or names a file outside the folder.
    """
    index = folder / INDEX
    if not index.exists():
        return [folder / "model.safetensors"]
    try:
        names = sorted(set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()))
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"{index} can't be read: {error}. Is {str(folder)!r} a Hugging Face folder?") from error
    for name in names:
        if name in ("", ".", "..") or Path(name).name != name:
            raise ConfigError(f"{index} names {name!r}; weights must be files in {str(folder)!r} itself.")
    return [folder / name for name in names]


def text_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a `config.json`; for a vision model those of its text part are among them.

    >>> text_fields({"model_type": "qwen2_vl", "text_config": {"vocab_size": 8}})["vocab_size"]
    8
    """
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else config
