"""A model whose weights were all trained, as a Hugging Face folder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from rl_protocol import OutputError, WeightTensor
from rl_protocol.torch import from_weight

_COPIED = ("config.json", "generation_config.json")
_WEIGHTS = "model.safetensors"


def write_model(folder: Path, *, base: Path, weights: Sequence[WeightTensor]) -> list[Path]:
    """Write weights and the configuration of the base into a folder that is empty; returns the files.

    Raises:
        OutputError: a file can't be written.
    """
    try:
        save_file({weight.name: from_weight(weight) for weight in weights}, folder / _WEIGHTS, {"format": "pt"})
        copied = [shutil.copyfile(base / name, folder / name) for name in _COPIED if (base / name).exists()]
    except (OSError, SafetensorError) as error:
        raise OutputError(f"The model can't be written to {folder}: {error}.", path=str(folder)) from error
    return [folder / _WEIGHTS, *copied]
