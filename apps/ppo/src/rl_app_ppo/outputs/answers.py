"""The answers to some validation prompts before and after training, from the samples of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import msgspec

from rl_app_ppo.outputs.run_folder import writing
from rl_protocol import RowKey
from rl_trainer.rewards.scorer import Scored
from rl_trainer.workers.sample_log import SampleRow

SHOWN = 5
"""Prompts, the first ones of the validation set."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt and its first response at two steps.

    Attributes:
        prompt: its text.
        before: the response, or what the reward function found in it, and whether it is right.
        after: the same at the later step.
    """

    prompt: str
    before: tuple[str, bool]
    after: tuple[str, bool]


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers at the first and the last validation of a run.

    Attributes:
        steps: of both validations.
        rows: the answers.
        note: on how to read them; empty: there is none.
    """

    steps: tuple[int, int]
    rows: tuple[Answer, ...]
    note: str


def read_answers(samples: Path) -> Answers | None:
    """Read the first and the last validation in a folder of samples; None: it has only one.

    Raises:
        OSError: a file can't be read.
        msgspec.DecodeError, UnicodeDecodeError: a file does not hold samples.
    """
    steps = sorted(files_by_step(samples))
    if len(steps) < 2:
        return None
    first, last = (_first_responses(samples / f"{step}.jsonl") for step in (steps[0], steps[-1]))
    rows = [
        Answer(first[row].prompt, _answer(first[row]), _answer(last[row]))
        for row in sorted(first.keys() & last.keys())[:SHOWN]
        if first[row].prompt == last[row].prompt
    ]
    if not rows:
        return None
    return Answers((steps[0], steps[-1]), tuple(rows), next(iter(last.values())).note)


def drop_samples_after(samples: Path, step: int) -> None:
    """Remove the samples of later steps, which a resumed run repeats, or does not reach.

    Raises:
        OutputError: the folder can't be written.
    """
    with writing(samples):
        for found, path in files_by_step(samples).items():
            if found > step:
                path.unlink()


def files_by_step(samples: Path) -> dict[int, Path]:
    """The files of the validations in the folder of samples, by step."""
    return {int(path.stem): path for path in samples.glob("*.jsonl") if path.stem.isdecimal()}


def one_line(text: str, length: int) -> str:
    """The end of a text as one line without control characters, at most `length` characters.

    >>> one_line("What is\\n1 + 1?", 8)
    '…s 1 + 1?'
    """
    flat = "".join(char if char.isprintable() else "\ufffd" for char in " ".join(text.split()))
    return flat if len(flat) <= length else f"…{flat[1 - length :]}"


def _first_responses(path: Path) -> dict[int, SampleRow]:
    """The last trajectory of the first session of each prompt, by its row in the data set."""
    rows: Sequence[SampleRow] = msgspec.json.Decoder(SampleRow).decode_lines(path.read_bytes())
    keyed = sorted(((RowKey.parse(row.key), row) for row in rows), key=itemgetter(0))
    return {int(key.uid.rpartition("-")[2]): row for key, row in keyed if key.session == 0}


def _answer(row: SampleRow) -> tuple[str, bool]:
    if not isinstance(row.outcome, Scored):
        return row.response, False
    return row.outcome.texts.get("pred", row.response), row.outcome.numbers.get("acc", 0.0) >= 1
