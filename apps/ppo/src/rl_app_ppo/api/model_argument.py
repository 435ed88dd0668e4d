"""The model of `train()`: a path, or a transformers model with its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from rl_app_ppo.api.content_folder import keep
from rl_protocol import ConfigError


@runtime_checkable
class Pretrained(Protocol):
    """A model, tokenizer or processor of transformers."""

    def save_pretrained(self, save_directory: str, /) -> object:
        """Write its files into a folder."""
        ...


def check_model(model: object, tokenizer: object) -> None:
    """Check the types of the arguments `model` and `tokenizer`.

    Raises:
        ConfigError: names the argument.
    """
    if isinstance(model, str | Path):
        if tokenizer is not None:
            raise ConfigError(
                f"tokenizer has no effect with model={str(model)!r}, which has its own. Leave it out, or load the model and give both objects."
            )
        return
    if not isinstance(model, Pretrained):
        raise ConfigError(
            f"model (model.path) must be a path, a name in the local Hugging Face cache, or a transformers model; got {type(model).__name__}."
        )
    if not isinstance(tokenizer, Pretrained):
        raise ConfigError(
            "tokenizer must be the tokenizer of the model that is given as an object, such as AutoTokenizer.from_pretrained(...); got "
            f"{type(tokenizer).__name__}."
        )


def model_path(model: str | Path | Pretrained, tokenizer: Pretrained | None, cache: Path | None) -> str:
    """The value of `model.path`.

    Args:
        model: the argument, checked.
        tokenizer: the tokenizer of a model that is an object.
        cache: folder into which objects are written; None: they are not, and the name of the
            argument stands for the path.

    Raises:
        OutputError: the cache can't be written.
    """
    if isinstance(model, str | Path):
        return str(model)
    if cache is None:
        return "model"

    def fill(folder: Path) -> None:
        model.save_pretrained(str(folder))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))

    return str(keep(cache, "model", fill))
