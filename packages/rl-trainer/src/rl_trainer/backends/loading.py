"""Loading transformers models for training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rl_protocol import ConfigError
from rl_trainer.backends.packing import PACKED_ATTENTION, register_packed_attention
from rl_trainer.data.images import FAMILIES


def load_model(path: str | Path, *, packed: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """A transformers causal language model of that element type, in evaluation mode (no dropout, also while training: PPO ratios must be exact).

    With `packed` it takes sequences joined end to end (see `rl_trainer.backends.packing`), and those alone. One of `data.images.FAMILIES` sees
    images, and can't be packed.

    Raises:
        ConfigError: the folder can't be read as a model.
    """
    attention: dict[str, str] = {}
    if packed:
        register_packed_attention()
        attention = {"attn_implementation": PACKED_ATTENTION}
    try:
        sees = AutoConfig.from_pretrained(str(path), local_files_only=True).model_type in FAMILIES
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model = kind.from_pretrained(str(path), dtype=dtype, local_files_only=True, **attention)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path={str(path)!r} can't be loaded as a transformers causal language model: {error}"
        ) from error
    if sees and packed:
        raise ConfigError(
            f"model.path={str(path)!r} sees images, which can't be joined end to end; set use_remove_padding to false."
        )
    return model.eval()


@dataclass(frozen=True, slots=True)
class Facts:
    """What is asked of a model's configuration; of one that sees, most of it is about the part that reads text."""

    hidden_size: int
    context: int
    """Most tokens it can see."""
    pad_id: int
    image_token: int | None
    """Stands for a piece of an image; None: it reads text alone."""
    banned: tuple[int, ...]
    """Tokens that stand for what is shown, and are never said."""
    pieces: int
    """Patches of an image that a token stands for."""

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
    """What a model that sees images is not trained with.

    Raises:
        ConfigError: adapters; or several ranks, of which one without an image in its rows would leave the others waiting.
    """
    if facts.image_token is not None and (lora or ranks > 1):
        got = "lora.rank above 0" if lora else f"{ranks} ranks"
        raise ConfigError(
            f"A model that sees images is trained whole, in one process; got {got}. Set lora.rank=0 and model_engine=torch."
        )


def layer_names(model: Any) -> tuple[str, ...]:
    """Class names of the repeated blocks of a transformers model."""
    return tuple(model._no_split_modules or ())
