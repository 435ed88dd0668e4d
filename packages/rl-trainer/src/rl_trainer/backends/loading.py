"""Loads transformers models for training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rl_protocol import ConfigError
from rl_trainer.backends.packing import PACKED_ATTENTION, register_packed_attention
from rl_trainer.data.images import FAMILIES
from rl_trainer.data.model_families import why_padded


def load_model(path: str | Path, *, packed: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """Load a transformers causal language model of that element type, in evaluation mode.

    Dropout is off also in training, since PPO ratios must be exact. With `packed` the model takes
    only sequences joined end to end (see `rl_trainer.backends.packing`). A model of
    `data.images.FAMILIES` sees images.

    Raises:
        ConfigError: the folder can't be read as a model, or `packed` a model that is not one of
            `data.model_families.JOINED_FAMILIES`.
    """
    family, attention = _family(path), dict[str, str]()
    if packed:
        if reason := why_padded(family):
            raise ConfigError(f"load_model.path={str(path)!r} {reason}; set UpdateConfig.use_remove_padding to false.")
        register_packed_attention()
        attention = {"attn_implementation": PACKED_ATTENTION}
    kind = AutoModelForImageTextToText if family in FAMILIES else AutoModelForCausalLM
    try:
        model = kind.from_pretrained(str(path), dtype=dtype, local_files_only=True, **attention)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    return model.eval()


def _family(path: str | Path) -> str:
    """`model_type` of the model in a folder."""
    try:
        return str(AutoConfig.from_pretrained(str(path), local_files_only=True).model_type)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str | Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"load_model.path={str(path)!r} can't be loaded as a transformers causal language model: {error}"
    )


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts from a model's configuration; for a model with images, mostly from its text part."""

    hidden_size: int
    context: int
    """Most tokens of a sequence."""
    pad_id: int
    image_token: int | None
    """Placeholder token of an image; None: the model reads text only."""
    banned: tuple[int, ...]
    """Placeholder tokens, which are never generated."""
    pieces: int
    """Image patches per placeholder token."""

    @classmethod
    def of(cls, model: Any) -> Facts:
        config, text = model.config, model.config.get_text_config()
        sees = config.model_type in FAMILIES
        return cls(
            hidden_size=int(text.hidden_size),
            context=int(text.max_position_embeddings),
            pad_id=int(text.pad_token_id or 0),
            image_token=int(config.image_token_id) if sees else None,
            banned=(int(config.image_token_id), int(config.video_token_id)) if sees else (),
            pieces=int(config.vision_config.spatial_merge_size) ** 2 if sees else 0,
        )


def require_alone(facts: Facts, *, lora: bool, ranks: int) -> None:
    """Refuse training options that a model with images does not support.

    Raises:
        ConfigError: adapters; or several ranks, since a rank without images would make the others
            wait.
    """
    if facts.image_token is not None and (lora or ranks > 1):
        got = "LoraConfig.rank above 0" if lora else f"{ranks} ranks"
        raise ConfigError(
            f"A model that sees images is trained whole, in one process; got {got}. Set LoraConfig.rank=0 and FsdpConfig.world_size=1."
        )


def layer_names(model: Any) -> tuple[str, ...]:
    """Class names of the repeated blocks of a transformers model."""
    return tuple(model._no_split_modules or ())
