"""A whole model as a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from rl_protocol import OutputError, WeightTensor
from rl_protocol.torch import from_weight

_CONFIG = "config.json"
_COPIED = ("generation_config.json",)
_WEIGHTS = "model.safetensors"


def write_model(
    folder: Path, *, base: Path, weights: Sequence[WeightTensor], changes: Mapping[str, object] | None = None
) -> list[Path]:
    """Write weights and the configuration of the base into a folder that is empty; returns the files.

    Args:
        folder: where.
        base: has the configuration.
        weights: all of them.
        changes: fields of the configuration that are others than the base's.

    Raises:
        OutputError: a file can't be written.
    """
    try:
        save_file({weight.name: from_weight(weight) for weight in weights}, folder / _WEIGHTS, {"format": "pt"})
        config = {**json.loads((base / _CONFIG).read_text()), **(changes or {})}
        (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        copied = [shutil.copyfile(base / name, folder / name) for name in _COPIED if (base / name).exists()]
    except (OSError, SafetensorError) as error:
        raise OutputError(f"The model can't be written to {folder}: {error}.", path=str(folder)) from error
    return [folder / _WEIGHTS, folder / _CONFIG, *copied]
