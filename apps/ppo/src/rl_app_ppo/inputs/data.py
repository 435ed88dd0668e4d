"""Open the training and validation prompts: from files, or the demo task. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.demo.addition import Problem
from rl_app_ppo.demo.demos import DEMOS
from rl_app_ppo.demo.tokenizer import demo_tokenizer
from rl_app_ppo.inputs.session import session_of
from rl_app_ppo.inputs.tokenizer import load_tokenizer
from rl_protocol import ConfigError
from rl_protocol.counted import counted
from rl_trainer import Mixture, PromptOrder, PromptRow
from rl_trainer import Tokenizer as SessionTokenizer
from rl_trainer.data.curricula.scored_order import ScoredOrder
from rl_trainer.data.curriculum import NamedCurriculum
from rl_trainer.data.validation_split import PreparedPrompts, Subset, hold_out
from rl_trainer.rollout.demonstrations import Demonstrations
from rl_trainer.rollout.teacher_context import TeacherContext

if TYPE_CHECKING:
    from rl_trainer.data.chat_template import PromptEncoder

_SHOWN_TOKENS = 40
"""Most tokens of a prompt that a message shows, from its end."""


class DemoDataset:
    """PromptDataset of a demo task."""

    def __init__(self, problems: Sequence[Problem], prompts: Sequence[Sequence[int]], data_source: str) -> None:
        self._rows = [
            PromptRow(prompt_ids=tuple(ids), data_source=data_source, ground_truth=p.answer)
            for p, ids in zip(problems, prompts, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> PromptRow:
        return self._rows[row]

    @property
    def rows_of_files(self) -> tuple[int, ...]:
        """Empty: the rows are from no file."""
        return ()

    @property
    def digests_of_files(self) -> tuple[str, ...]:
        """Empty: the rows are from no file."""
        return ()

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(row.prompt_ids) for row in self._rows)

    @property
    def largest_token(self) -> int:
        """Largest token id of all prompts."""
        return max(max(row.prompt_ids) for row in self._rows)

    @property
    def most_image_tokens(self) -> int:
        """The demos have no images."""
        return 0


def open_data(config: AppConfig, model_path: Path | None) -> Mapping[str, PreparedPrompts]:
    """Open the splits `train` and, if the run validates, `val`.

    Args:
        config: the configuration of the run.
        model_path: folder of the model; None: the demo model, which need not exist yet.

    Raises:
        ConfigError: tokenizer or files can't be used.
    """
    data = config.data
    if data.train_files:
        return _from_files(config, model_path)
    demo = DEMOS[data.demo]
    encode = _demo_prompts(config, model_path)
    split = demo.make_split(data.seed, train_size=data.train_size, validation_size=data.val_size)
    return {
        "train": DemoDataset(split.train, encode(split.train), demo.data_source),
        "val": DemoDataset(split.validation, encode(split.validation), demo.data_source),
    }


def _demo_prompts(config: AppConfig, model_path: Path | None) -> Callable[[Sequence[Problem]], Sequence[Sequence[int]]]:
    """Encodes the prompts of problems: in a chat if the demo has one, else as plain text."""
    demo, tools = DEMOS[config.data.demo], session_of(config, model_path).tools
    if demo.template or tools:
        from rl_app_ppo.demo.prompts import prompt_ids  # imports jinja2, which plain text does not need

        return partial(prompt_ids, _encoder(config, model_path, tools))
    tokenizer = load_tokenizer(model_path) if model_path else demo_tokenizer(demo.vocabulary)
    return lambda problems: [one.ids for one in tokenizer.encode_batch([problem.prompt for problem in problems])]


def _encoder(config: AppConfig, model_path: Path | None, tools: Sequence[Mapping[str, Any]]) -> PromptEncoder:
    from rl_trainer.data.chat_template import PromptEncoder  # imports jinja2

    if model_path:
        return PromptEncoder.load(model_path, tools)
    demo = DEMOS[config.data.demo]
    return PromptEncoder(demo_tokenizer(demo.vocabulary), demo.template, tools=tools)


def _from_files(config: AppConfig, model_path: Path | None) -> Mapping[str, PreparedPrompts]:
    from rl_trainer.data.prompt_files import open_files
    from rl_trainer.data.prompt_preparation import DataFiles  # imports pyarrow, which the demo does not need

    data = config.data
    encoder = _encoder(config, model_path, session_of(config, model_path).tools)

    def opened(names: Sequence[str]) -> PreparedPrompts:
        files = DataFiles(
            paths=tuple(Path(name).expanduser() for name in names),
            prompt_key=data.prompt_key,
            ground_truth_key=data.ground_truth_key,
            max_prompt_length=data.max_prompt_length,
            filter_overlong_prompts=data.filter_overlong_prompts,
            on_bad_row="skip" if data.on_bad_row == "skip" else "error",
            session=config.rollout.session,
        )
        return open_files(files, encoder, Path(config.model.cache_dir).expanduser())

    whole = opened(data.files("train"))
    if data.val_files:
        return {"train": whole, "val": opened(data.files("val"))}
    if not config.holds_out:
        return {"train": whole}
    train, val = hold_out(len(whole), data.val_split)
    return {"train": Subset(whole, train), "val": Subset(whole, val)}


def demonstrations(config: AppConfig, tokenizer: SessionTokenizer, eos_id: int) -> Demonstrations:
    """Reads the answers of training rows (data.answer_key)."""
    given = partial(config.algorithm.given_responses, divergence=config.actor.use_kl_loss)
    return Demonstrations(tokenizer=tokenizer, eos_id=eos_id, key=config.data.answer_key, given=given)


def teacher_context(config: AppConfig, tokenizer: SessionTokenizer, eos_id: int) -> TeacherContext:
    """Writes the prompts of the teacher in self-distillation."""
    answers = demonstrations(config, tokenizer, eos_id)
    return TeacherContext(text=config.algorithm.teacher_context, answers=answers)


def longest_teacher_prompt(config: AppConfig, tokenizer: SessionTokenizer, rows: PreparedPrompts) -> int:
    """Most tokens of the teacher's prompts.

    Raises:
        ConfigError: a row has no answer for it.
    """
    teacher = teacher_context(config, tokenizer, eos_id=0)
    return max(len(teacher.prompt(rows[row])) for row in range(len(rows)))


def check_answers(config: AppConfig, tokenizer: SessionTokenizer, rows: PreparedPrompts) -> None:
    """Check the answer of every row whose answer is trained on.

    Raises:
        ConfigError: rows have no answer, or a longer one than rollout.response_length; has the
            number of these rows, and the prompt of the first.
    """
    reader = demonstrations(config, tokenizer, eos_id=0)
    refused, first = 0, ""
    for row in (rows[place] for place in range(len(rows))):
        if not reader.given(row.data_source, config.rollout.n):
            continue
        try:
            reader.trajectory(row, 0, config.rollout.response_length)
        except ConfigError as error:
            refused += 1
            first = first or f"{error.message} The prompt of that row ends with {_end_of_prompt(row, tokenizer)!r}."
    if refused:
        raise ConfigError(f"{first} {counted(refused, 'row')} of {len(rows)} can't be trained on.")


def _end_of_prompt(row: PromptRow, tokenizer: SessionTokenizer) -> str:
    return tokenizer.decode(row.prompt_ids[-_SHOWN_TOKENS:])


def about_validation(config: AppConfig, data: Mapping[str, PreparedPrompts]) -> str:
    """A note on the validation data of a run without `data.val_files`; empty: nothing to note."""
    if config.holds_out:
        held, rows = len(data["val"]), sum(map(len, data.values()))
        return f"validation: {held} of the {rows} rows of data.train_files are held out (data.val_split={config.data.val_split:g})"
    return "" if "val" in data else "no validation: data.val_files is empty, and no rows are held out"


def sessions_of(config: AppConfig, rows: PreparedPrompts) -> Callable[[int], int] | None:
    """How many responses to the prompt of a row are trained on; None: rollout.n, of every row."""
    algorithm, n, divergence = config.algorithm, config.rollout.n, config.actor.use_kl_loss
    if algorithm.fewest_sessions(n, divergence=divergence) == n:
        return None
    return lambda row: algorithm.sessions(rows[row].data_source, n, divergence=divergence)


def train_order(config: AppConfig, rows: PreparedPrompts) -> PromptOrder:
    """The order of training prompts: a curriculum, or shuffled with the shares of the files.

    Raises:
        ConfigError: the curriculum or the shares can't be used with these rows.
    """
    data, seed, curriculum = config.data, config.trainer.seed, None
    if data.curriculum:
        curriculum = NamedCurriculum(data.curriculum, rows)
        if curriculum.sees_scores:
            sources = [rows[row].data_source for row in range(len(rows))]
            return ScoredOrder(sources, data.train_batch_size, seed, curriculum, data.target_score)
    elif shares := data.shares():
        curriculum = Mixture(rows.rows_of_files, shares)
    return PromptOrder(len(rows), data.train_batch_size, seed, curriculum)
