"""Loading transformers models for training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rl_protocol import ConfigError
from rl_trainer.backends.packing import PACKED_ATTENTION, register_packed_attention


def load_model(path: str | Path, *, packed: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """A transformers causal language model of that element type, in evaluation mode (no dropout, also while training: PPO ratios must be exact).

    With `packed` it takes sequences joined end to end (see `rl_trainer.backends.packing`), and those alone.

    Raises:
        ConfigError: the folder can't be read as a model.
    """
    attention: dict[str, str] = {}
    if packed:
        register_packed_attention()
        attention = {"attn_implementation": PACKED_ATTENTION}
    try:
        model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype, local_files_only=True, **attention)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path={str(path)!r} can't be loaded as a transformers causal language model: {error}"
        ) from error
    return model.eval()


def layer_names(model: Any) -> tuple[str, ...]:
    """Class names of the repeated blocks of a transformers model."""
    return tuple(model._no_split_modules or ())
