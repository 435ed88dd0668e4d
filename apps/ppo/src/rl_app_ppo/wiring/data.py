"""Prompts from files, or the demo task as a PromptDataset; no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from rl_app_ppo.demo.arithmetic import Problem
from rl_app_ppo.demo.demos import DEMOS
from rl_app_ppo.demo.vocabulary import demo_tokenizer
from rl_app_ppo.schema import AppConfig
from rl_protocol import ConfigError
from rl_trainer import Mixture, PromptOrder, PromptRow
from rl_trainer.data.curricula import NamedCurriculum
from rl_trainer.data.images import Vision
from rl_trainer.data.split import Measured, Selected, hold_out
from rl_trainer.sessions import Codec


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


def vision_of(model_path: Path) -> Vision | None:
    """How the model in a checkpoint folder sees images; None: it reads text alone.

    Raises:
        ConfigError: it sees, and does not say how it cuts images.
    """
    found = Vision.load(model_path)
    return found if isinstance(found, Vision) else None


class DemoDataset:
    """Problems as token ids."""

    def __init__(self, problems: Sequence[Problem], tokenizer: Tokenizer, data_source: str) -> None:
        self._rows = [
            PromptRow(prompt_ids=tuple(tokenizer.encode(p.prompt).ids), data_source=data_source, ground_truth=p.answer)
            for p in problems
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> PromptRow:
        return self._rows[row]

    @property
    def rows_of_files(self) -> tuple[int, ...]:
        """It is from none."""
        return ()

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(row.prompt_ids) for row in self._rows)

    @property
    def largest_token(self) -> int:
        """Largest token id of all prompts."""
        return max(max(row.prompt_ids) for row in self._rows)


def open_data(config: AppConfig, model_path: Path | None) -> Mapping[str, Measured]:
    """The splits `train` and, in a run that validates, `val`; `model_path` is None while there is no model yet: the demo's tokenizer is known.

    Raises:
        ConfigError: tokenizer or files can't be used.
    """
    data = config.data
    if data.train_files:
        return _from_files(config, model_path)
    demo = DEMOS[data.demo]
    tokenizer = load_tokenizer(model_path) if model_path else demo_tokenizer(demo.vocabulary)
    split = demo.make_split(data.seed, train_size=data.train_size, validation_size=data.val_size)
    return {
        "train": DemoDataset(split.train, tokenizer, demo.data_source),
        "val": DemoDataset(split.validation, tokenizer, demo.data_source),
    }


def _from_files(config: AppConfig, model_path: Path | None) -> Mapping[str, Measured]:
    from rl_trainer.data.chat import PromptEncoder
    from rl_trainer.data.files import DataFiles, open_files  # pyarrow: the demo does without it

    data = config.data
    encoder = (
        PromptEncoder.load(model_path) if model_path else PromptEncoder(demo_tokenizer(DEMOS[data.demo].vocabulary))
    )

    def opened(names: Sequence[str]) -> Measured:
        files = DataFiles(
            paths=tuple(Path(name).expanduser() for name in names),
            prompt_key=data.prompt_key,
            max_prompt_length=data.max_prompt_length,
            filter_overlong_prompts=data.filter_overlong_prompts,
            on_bad_row="skip" if data.on_bad_row == "skip" else "error",
        )
        return open_files(files, encoder, Path(config.model.cache_dir).expanduser())

    whole = opened(data.files("train"))
    if data.val_files:
        return {"train": whole, "val": opened(data.files("val"))}
    if not config.holds_out:
        return {"train": whole}
    train, val = hold_out(len(whole), data.val_split)
    return {"train": Selected(whole, train), "val": Selected(whole, val)}


def about_validation(config: AppConfig, data: Mapping[str, Measured]) -> str:
    """What a run whose `data.val_files` is empty validates with; empty: nothing is to be said."""
    if config.holds_out:
        held, rows = len(data["val"]), sum(map(len, data.values()))
        return f"validation: {held} of the {rows} rows of data.train_files are held out (data.val_split={config.data.val_split:g})"
    return "" if "val" in data else "no validation: data.val_files is empty, and no rows are held out"


def train_order(config: AppConfig, rows: Measured) -> PromptOrder:
    """The order of training prompts: that of data.curriculum, or shuffled, in the shares of data.train_files.

    Raises:
        ConfigError: the curriculum or the shares can't be used with these rows.
    """
    data, curriculum = config.data, None
    if data.curriculum:
        curriculum = NamedCurriculum(data.curriculum, rows)
    elif shares := data.shares():
        curriculum = Mixture(rows.rows_of_files, shares)
    return PromptOrder(len(rows), data.train_batch_size, config.trainer.seed, curriculum)


def decoder(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """Token ids -> text without special tokens."""

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=True)

    return decode


def codec(tokenizer: Tokenizer) -> Codec:
    """What sessions read and write text with."""
    return Codec(encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids, decode=decoder(tokenizer))
