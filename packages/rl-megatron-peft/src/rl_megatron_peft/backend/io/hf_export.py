"""Write a whole model as a Hugging Face folder."""

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
_DTYPE = ("dtype", "torch_dtype")
"""Names of the element type in the configuration: of transformers 5, and of 4 and before."""
_COPIED = ("generation_config.json",)
_WEIGHTS = "model.safetensors"
_TOKENIZER = ("*token*", "vocab.*", "merges.txt", "chat_template.*", "additional_chat_templates/*")
"""Files of transformers' tokenizers, relative to the folder of the model."""


def write_model(
    folder: Path, *, base: Path, weights: Sequence[WeightTensor], changes: Mapping[str, object] | None = None
) -> list[Path]:
    """Write weights and configuration into an empty folder and return the files.

    The configuration names the element type of the first weight, in which transformers loads all.

    Args:
        folder: the folder.
        base: folder of the base model, whose configuration is copied.
        weights: all weights.
        changes: fields of the configuration to replace or add.

    Raises:
        OutputError: a file can't be written.
    """
    try:
        save_file({weight.name: from_weight(weight) for weight in weights}, folder / _WEIGHTS, {"format": "pt"})
        config: dict[str, object] = json.loads((base / _CONFIG).read_text())
        dtypes = [name for name in _DTYPE if name in config] or _DTYPE[:1]
        config |= {**dict.fromkeys(dtypes, weights[0].dtype), **(changes or {})}
        (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        copied = [shutil.copyfile(base / name, folder / name) for name in _COPIED if (base / name).exists()]
    except (OSError, SafetensorError) as error:
        raise OutputError(f"The model can't be written to {folder}: {error}.", path=str(folder)) from error
    return [folder / _WEIGHTS, folder / _CONFIG, *copied]


def copy_tokenizer(base: Path, folder: Path) -> list[Path]:
    """Copy the tokenizer files and chat templates of the base model and return the copies."""
    found = {file.relative_to(base) for pattern in _TOKENIZER for file in base.glob(pattern) if file.is_file()}
    for name in found:
        (folder / name).parent.mkdir(exist_ok=True)
    return [Path(shutil.copyfile(base / name, folder / name)) for name in sorted(found)]
