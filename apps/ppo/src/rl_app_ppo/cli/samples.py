"""`rl samples`: responses and scores that a run has written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from rl_app_ppo.cli.columns import columns
from rl_app_ppo.outputs.answers import one_line
from rl_protocol import ConfigError, RowKey
from rl_trainer.rewards.scorer import Scored
from rl_trainer.workers.sample_log import SampleRow

SORTS = ("key", "reward", "length")
_WIDTH = 60
"""Most characters of a text."""


def read_samples(run: Path, step: int | None, *, train: bool, sort: str) -> list[SampleRow]:
    """Read the samples of one step of a run, in the order of their prompts, or by reward or length
    of the response in characters, the lowest first; those without a reward come first of all.

    Args:
        run: folder of the run.
        step: None: the newest that has samples.
        train: training responses instead of those of the validation.
        sort: one of SORTS.

    Raises:
        ConfigError: there is no such run, step or order, or a file is damaged.
    """
    if sort not in SORTS:
        raise ConfigError(f"--sort must be one of {', '.join(SORTS)}; got {sort!r}.")
    if not run.is_dir():
        raise ConfigError(f"{run} is no folder; give the folder of a run, which its end printed.")
    files = _files(run / "samples", "train-" if train else "")
    what = f"samples of {'training' if train else 'validation'}"
    if not files:
        raise ConfigError(f"{run} has no {what}; see trainer.test_freq.")
    if step is None:
        step = max(files)
    if step not in files:
        raise ConfigError(
            f"{run} has no {what} of step {step}; there are those of steps {', '.join(map(str, sorted(files)))}."
        )
    rows = [row for path in files[step] for row in _read(path)]
    if sort == "reward":
        return sorted(rows, key=_reward_or_least)
    if sort == "length":
        return sorted(rows, key=lambda row: len(row.response))
    return sorted(rows, key=_place)


def samples_text(rows: Sequence[SampleRow]) -> str:
    """One line per sample."""
    lines = [("key", "reward", "prompt", "response", "ground truth")]
    for row in rows:
        reward = _reward(row)
        prompt, response, truth = (one_line(text, _WIDTH) for text in (row.prompt, row.response, row.ground_truth))
        lines.append((row.key, "failed" if reward is None else f"{reward:.3f}", prompt, response, truth))
    return columns(lines)


def _files(folder: Path, prefix: str) -> dict[int, list[Path]]:
    """The files of each step; a step of several rounds has one for each."""
    found: dict[int, list[Path]] = {}
    for path in sorted(folder.glob(f"{prefix}*.jsonl")):
        step = path.stem.removeprefix(prefix).partition("-")[0]
        if step.isdecimal():
            found.setdefault(int(step), []).append(path)
    return found


def _read(path: Path) -> list[SampleRow]:
    try:
        return msgspec.json.Decoder(SampleRow).decode_lines(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"The samples {path} can't be read: {error}.") from error


def _reward(row: SampleRow) -> float | None:
    return row.outcome.numbers["score"] if isinstance(row.outcome, Scored) else None


def _reward_or_least(row: SampleRow) -> float:
    reward = _reward(row)
    return float("-inf") if reward is None else reward


def _place(row: SampleRow) -> tuple[int, int, int]:
    key = RowKey.parse(row.key)
    return int(key.uid.rpartition("-")[2]), key.session, key.index
