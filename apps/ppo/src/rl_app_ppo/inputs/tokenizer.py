"""Load the tokenizer and image settings of a model folder. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from rl_app_ppo.config.model_path import read_json
from rl_protocol import ConfigError
from rl_trainer import Tokenizer as SessionTokenizer
from rl_trainer.data.images import Vision


def load_tokenizer(model_path: Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face checkpoint folder with the tokenizers library.

    Raises:
        ConfigError: there is no readable tokenizer.json.
    """
    path = model_path / "tokenizer.json"
    try:
        return Tokenizer.from_buffer(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path={str(model_path)!r}: tokenizer.json can't be read: {error}. "
            "Give a folder written by save_pretrained, or leave model.path empty for the demo model."
        ) from error


def vision_of(model_path: Path) -> Vision | None:
    """The image settings of the model in a checkpoint folder; None: it reads text only.

    Raises:
        ConfigError: it is a vision model without the settings of its image processor.
    """
    found = Vision.load(model_path)
    return found if isinstance(found, Vision) else None


def decoder(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """A function from token ids to text without special tokens."""

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=True)

    return decode


def raw_decoder(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """A function from token ids to text with special tokens."""

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    return decode


def session_tokenizer(tokenizer: Tokenizer, vision: Vision | None = None) -> SessionTokenizer:
    """The tokenizer of sessions.

    Texts that it encodes, such as answers of tools, have no images, so a name of the image token in
    them becomes nothing.

    Args:
        tokenizer: of the policy.
        vision: the image settings of the policy; None: it reads text only.
    """
    image = None if vision is None else vision.token

    def encode(text: str) -> list[int]:
        return [token for token in tokenizer.encode(text, add_special_tokens=False).ids if token != image]

    return SessionTokenizer(encode=encode, decode=decoder(tokenizer))


def eos_of(model_path: Path) -> int:
    """The token that ends a response of the model in a checkpoint folder.

    Raises:
        ConfigError: neither generation_config.json nor config.json names one.
    """
    for name in ("generation_config.json", "config.json"):
        file = model_path / name
        found = read_json(file, str(model_path)).get("eos_token_id") if file.exists() else None
        first = found[0] if isinstance(found, list) and found else found
        if isinstance(first, int):
            return first
    raise ConfigError(
        f"model.path={str(model_path)!r}: neither generation_config.json nor config.json has an eos_token_id, the token that ends a response."
    )
