"""Countdown: "3 5 2 make 17: " -> "3*5+2", with three digits in their order and +, - and *.

The careless answer has a wrong last operator: 3*5-2. As a valid expression it scores 0.1, and the
right one 1 (`rl_trainer.rewards.countdown`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction
from itertools import product

import msgspec

from rl_app_ppo.demo.addition import Problem, Split, numbers_of
from rl_protocol import ConfigError
from rl_trainer.rewards.arithmetic import BINARY, evaluate
from rl_trainer.rewards.countdown import Countdown

OPERATORS = "+-*"
CARELESS = {"+": "-", "-": "+", "*": "+"}
"""Last operator -> the one that careless answers have."""
LARGEST_NUMBER, LARGEST_TARGET = 9, 99
WORDS = (" ", " make ", ": ", "-", "*")
"""Tokens of prompts and answers that `addition.ALPHABET` lacks."""
DATA_SOURCE = "countdown"


def make_split(seed: int, *, train_size: int, validation_size: int) -> Split:
    """Draw both splits; equal arguments give equal splits.

    The validation split does not depend on `train_size`. No puzzle is in both, in any order of its
    numbers.

    Raises:
        ConfigError: a size is negative, or there are not that many puzzles.
    """
    draw = random.Random(seed)  # noqa: S311 - puzzles, not secrets
    groups = _groups()
    draw.shuffle(groups)
    problems = [_problem(puzzle) for group in groups for puzzle in group]
    validation, others = problems[:validation_size], problems[validation_size:]
    held_out = {numbers_of(problem) for problem in validation}
    train = [problem for problem in others if numbers_of(problem) not in held_out]
    draw.shuffle(train)
    if min(train_size, validation_size) < 0 or train_size > len(train):
        raise ConfigError(
            f"There are {len(problems)} puzzles; got data.train_size={train_size} and data.val_size={validation_size}. Set sizes of at least 0; "
            f"with this data.val_size, data.train_size can be at most {len(train)}."
        )
    return Split(train=tuple(train[:train_size]), validation=tuple(validation))


def solution(problem: Problem) -> str:
    """An expression that makes the target; the first of them if there are several."""
    puzzle = msgspec.json.decode(problem.answer, type=Countdown)
    return next(text for text, value in _expressions(puzzle.numbers) if value == puzzle.target)


def careless_answer(problem: Problem) -> str:
    """The solution with a wrong last operator: the mistake that the warm-up teaches."""
    text = solution(problem)
    return text[:-2] + CARELESS[text[-2]] + text[-1]


def _expressions(numbers: tuple[int, ...]) -> Iterator[tuple[str, Fraction]]:
    """All expressions of the numbers in their order, with their values."""
    for signs in product(OPERATORS, repeat=len(numbers) - 1):
        text = "".join(f"{number}{sign}" for number, sign in zip(numbers, (*signs, ""), strict=True))
        yield text, evaluate(text, BINARY, Fraction)


def _groups() -> list[list[Countdown]]:
    """All puzzles that have a solution; those of equal numbers, target included, in one group."""
    found: dict[tuple[int, ...], list[Countdown]] = {}
    for numbers in product(range(1, LARGEST_NUMBER + 1), repeat=3):
        for target in dict.fromkeys(value for _, value in _expressions(numbers)):
            if 1 <= target <= LARGEST_TARGET:
                puzzle = Countdown(numbers, int(target))
                found.setdefault(tuple(sorted((*numbers, puzzle.target))), []).append(puzzle)
    return list(found.values())


def _problem(puzzle: Countdown) -> Problem:
    numbers = " ".join(map(str, puzzle.numbers))
    return Problem(f"{numbers} make {puzzle.target:2d}: ", msgspec.json.encode(puzzle).decode())
