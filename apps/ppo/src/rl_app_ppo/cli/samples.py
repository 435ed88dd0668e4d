"""`rl samples`: responses and scores that a run has written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from rl_app_ppo.cli.columns import columns
from rl_app_ppo.outputs.answers import files_by_step, one_line
from rl_app_ppo.outputs.run_folder import files_of
from rl_app_ppo.outputs.run_record import read_run
from rl_protocol import BatchError, ConfigError, RowKey
from rl_protocol.errors import UNREADABLE
from rl_trainer.record.record_rows import TrajectoryRow
from rl_trainer.rewards.scorer import Failure, Scored
from rl_trainer.workers.sample_log import SampleRow

SORTS = ("key", "reward", "length")
_NEWEST_ALONE = 1
"""Response tokens to keep: the newest step is kept, whatever its size."""
_WIDTH = 60
"""Most characters of a text."""


def read_samples(run: Path, step: int | None, *, train: bool, sort: str, descending: bool = False) -> list[SampleRow]:
    """Read the samples of one step of a run, in the order of their prompts, or by reward or length
    of the response in characters, the lowest first; those without a reward come first of all.
    `descending` reverses the order.

    Args:
        run: folder of the run.
        step: None: the newest that has samples.
        train: the recorded training responses instead of those of the validation.
        sort: one of SORTS.
        descending: the highest first.

    Raises:
        ConfigError: there is no such run, step or order, or a file is damaged.
    """
    if sort not in SORTS:
        raise ConfigError(f"--sort must be one of {', '.join(SORTS)}; got {sort!r}.")
    files_of(run)
    rows = _chosen(_trained(run, step) if train else _validated(run), run, step, train=train)
    if sort == "reward":
        return sorted(rows, key=_reward_or_least, reverse=descending)
    if sort == "length":
        return sorted(rows, key=lambda row: len(row.response), reverse=descending)
    return sorted(rows, key=_place, reverse=descending)


def samples_text(rows: Sequence[SampleRow]) -> str:
    """One line per sample, with the parts of its reward: what the function returned beside `score`
    and `acc`.
    """
    parts = sorted({name for row in rows for name in _numbers(row)} - {"score", "acc"})
    lines = [("key", "reward", *parts, "prompt", "response", "ground truth")]
    for row in rows:
        numbers = _numbers(row)
        reward = f"{numbers['score']:.3f}" if "score" in numbers else "failed"
        shown = (f"{numbers[name]:.3f}" if name in numbers else "" for name in parts)
        prompt, response, truth = (one_line(text, _WIDTH) for text in (row.prompt, row.response, row.ground_truth))
        lines.append((row.key, reward, *shown, prompt, response, truth))
    return columns(lines)


def _chosen(
    found: Mapping[int, Callable[[], list[SampleRow]]], run: Path, step: int | None, *, train: bool
) -> list[SampleRow]:
    """The samples of a step; None: of the newest."""
    what = f"samples of {'training' if train else 'validation'}"
    if not found:
        raise ConfigError(f"{run} has no {what}; see trainer.{'sample_freq' if train else 'test_freq'}.")
    if step is None:
        step = max(found)
    if step not in found:
        raise ConfigError(
            f"{run} has no {what} of step {step}; there are those of steps {', '.join(map(str, sorted(found)))}."
        )
    return found[step]()


def _validated(run: Path) -> dict[int, Callable[[], list[SampleRow]]]:
    """What reads the validation of each step."""
    return {step: partial(_read, path) for step, path in files_by_step(run / "samples").items()}


def _trained(run: Path, step: int | None) -> dict[int, Callable[[], list[SampleRow]]]:
    """What returns the recorded trajectories of each step, of which only this one is in memory;
    None: the newest.
    """
    record = read_run(run, _NEWEST_ALONE) if step is None else read_run(run, step=step)
    found: dict[int, list[SampleRow]] = {recorded: [] for recorded in record.trajectory_steps}
    for row in record.trajectories:
        found[row.step].append(_sample(row))
    return {recorded: partial(list, rows) for recorded, rows in found.items()}


def _sample(row: TrajectoryRow) -> SampleRow:
    outcome = Scored(numbers=row.reward, texts=row.texts)
    return SampleRow(
        key=row.key,
        data_source=row.data_source,
        prompt=row.prompt,
        response=row.response,
        ground_truth=row.ground_truth,
        outcome=Failure(kind="exception", message=row.failure) if row.failure else outcome,
    )


def _read(path: Path) -> list[SampleRow]:
    try:
        return msgspec.json.Decoder(SampleRow).decode_lines(path.read_bytes())
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"The samples {path} can't be read: {error}.") from error


def _numbers(row: SampleRow) -> Mapping[str, float]:
    """What the reward function returned; empty: it failed."""
    return row.outcome.numbers if isinstance(row.outcome, Scored) else {}


def _reward(row: SampleRow) -> float | None:
    return _numbers(row).get("score")


def _reward_or_least(row: SampleRow) -> float:
    reward = _reward(row)
    return float("-inf") if reward is None else reward


def _place(row: SampleRow) -> tuple[int, int, int]:
    try:
        key = RowKey.parse(row.key)
        return int(key.uid.rpartition("-")[2]), key.session, key.index
    except (BatchError, ValueError) as error:
        raise ConfigError(f"A sample has a damaged key: {row.key!r}.") from error
