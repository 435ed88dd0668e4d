"""Write demo tasks as data files in verl's row format, to train on or as examples:

python -m rl_app_ppo.demo.tasks countdown data/countdown --train 1000 --val 100
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec

from rl_app_ppo.demo.addition import SUMS_DATA_SOURCE, Problem, make_sums
from rl_protocol import ConfigError
from rl_trainer.rewards.arithmetic import BINARY
from rl_trainer.rewards.countdown import Countdown

Row = dict[str, Any]
Splits = tuple[list[Row], list[Row]]
"""Training and validation rows; no prompt is in both."""


def row(data_source: str, prompt: str, ground_truth: object, split: str, index: int) -> Row:
    """One row in verl's format."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index},
    }


def arithmetic(seed: int, train: int, val: int) -> Splits:
    """The demo task sums: reward.function=exact_match."""
    split = make_sums(seed, train_size=train, validation_size=val)

    def rows(problems: Sequence[Problem], name: str) -> list[Row]:
        return [row(SUMS_DATA_SOURCE, p.prompt, p.answer, name, i) for i, p in enumerate(problems)]

    return rows(split.train, "train"), rows(split.validation, "val")


def sorting(seed: int, train: int, val: int) -> Splits:
    """Sort five numbers: reward.function=exact_match."""
    draw = random.Random(seed)  # noqa: S311 - problems, not secrets
    lists: dict[tuple[int, ...], None] = {}
    while len(lists) < train + val:
        lists[tuple(draw.randint(0, 99) for _ in range(5))] = None
    problems = [
        (
            f"Sort from smallest to largest, answer with the numbers alone: {' '.join(map(str, one))}",
            " ".join(map(str, sorted(one))),
        )
        for one in lists
    ]
    return _split("sorting", problems, train)


def countdown(seed: int, train: int, val: int) -> Splits:
    """Reach a number with three others: reward.function=countdown."""
    problems = [
        (
            f"Use {', '.join(map(str, one.numbers))}, each at most once, with + - * / and brackets to make {one.target}. "
            "Answer with the expression alone.",
            {"numbers": one.numbers, "target": one.target},
        )
        for one in puzzles(seed, train + val)
    ]
    return _split("countdown", problems, train)


def puzzles(seed: int, count: int, size: int = 3, largest: int = 20) -> list[Countdown]:
    """Draw different Countdown puzzles from random expressions, so that each has a solution.

    Equal arguments give equal puzzles.
    """
    draw = random.Random(seed)  # noqa: S311 - puzzles, not secrets
    found: dict[Countdown, None] = {}
    while len(found) < count:
        numbers = [draw.randint(1, largest) for _ in range(size)]
        value = Fraction(numbers[0])
        for number in numbers[1:]:
            value = draw.choice(list(BINARY.values()))(value, Fraction(number))
        draw.shuffle(numbers)
        if value.denominator == 1 and 0 < value <= 100:
            found[Countdown(tuple(numbers), int(value))] = None
    return list(found)


TASKS: Mapping[str, Callable[[int, int, int], Splits]] = {
    "arithmetic": arithmetic,
    "sorting": sorting,
    "countdown": countdown,
}


def write(task: str, folder: Path, *, train: int, val: int, seed: int = 0) -> tuple[Path, Path]:
    """Write `train.jsonl` and `val.jsonl` into the folder; returns their paths.

    Raises:
        ConfigError: an unknown task, or impossible sizes.
    """
    if task not in TASKS or min(train, val) < 1:
        raise ConfigError(
            f"There are the tasks {', '.join(TASKS)}, of at least 1 row each; got {task!r}, {train}, {val}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.jsonl", folder / "val.jsonl"
    for path, rows in zip(paths, TASKS[task](seed, train, val), strict=True):
        path.write_bytes(msgspec.json.Encoder().encode_lines(rows))
    return paths


def _split(data_source: str, problems: Sequence[tuple[str, object]], train: int) -> Splits:
    def rows(part: Sequence[tuple[str, object]], name: str) -> list[Row]:
        return [row(data_source, prompt, truth, name, i) for i, (prompt, truth) in enumerate(part)]

    return rows(problems[:train], "train"), rows(problems[train:], "val")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write a demo task as data files in verl's row format.")
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=1000)
    parser.add_argument("--val", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    try:
        train, val = write(given.task, given.folder, train=given.train, val=given.val, seed=given.seed)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"data.train_files={train} data.val_files={val}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
