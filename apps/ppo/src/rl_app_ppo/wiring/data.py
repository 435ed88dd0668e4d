"""The demo task as a PromptDataset; no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from rl_app_ppo.demo.arithmetic import DATA_SOURCE, Problem, make_split
from rl_app_ppo.schema import DataConfig
from rl_protocol import ConfigError
from rl_trainer import PromptDataset, PromptRow


def load_tokenizer(model_path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face checkpoint folder, by the tokenizers library alone.

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


class ArithmeticDataset:
    """Problems as token ids."""

    def __init__(self, problems: Sequence[Problem], tokenizer: Tokenizer) -> None:
        self._rows = [
            PromptRow(prompt_ids=tuple(tokenizer.encode(p.prompt).ids), data_source=DATA_SOURCE, ground_truth=p.answer)
            for p in problems
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> PromptRow:
        return self._rows[row]


def datasets(config: DataConfig, tokenizer: Tokenizer) -> dict[str, PromptDataset]:
    """The `train` and `val` splits."""
    split = make_split(config.seed, train_size=config.train_size, validation_size=config.val_size)
    return {"train": ArithmeticDataset(split.train, tokenizer), "val": ArithmeticDataset(split.validation, tokenizer)}


def decoder(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """Token ids -> text without special tokens."""

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=True)

    return decode
