"""Two-digit addition: "37+45=" -> "82" (the demo task sums), or "280" (the demo task addition).

The careless answer, the sum without carries, is the mistake that the warm-up teaches and training
removes. With the units first, as in `addition`, every carry is known before it is needed; the
published benchmarks train on it.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from rl_protocol import ConfigError

OPERAND_DIGITS = 2
ANSWER_DIGITS = OPERAND_DIGITS + 1
ALPHABET = "0123456789+="
"""Every character of a prompt or an answer."""
DATA_SOURCE = "two_digit_addition"
SUMS_DATA_SOURCE = "sums"


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt and its answer."""

    prompt: str
    """Operands, operator and "="; addition: 6 characters with leading zeros."""
    answer: str
    """Sums: the number; addition: 3 digits, units first; countdown: the JSON that is its truth."""


@dataclass(frozen=True, slots=True)
class Split:
    """Training and validation problems; no problem is in both, in any order of its numbers."""

    train: tuple[Problem, ...]
    validation: tuple[Problem, ...]

    def __post_init__(self) -> None:
        shared = {numbers_of(p) for p in self.train} & {numbers_of(p) for p in self.validation}
        if shared:
            raise ConfigError(
                f"{len(shared)} problems are in both splits, such as {min(shared)}; a problem may be in one split only."
            )


def make_split(seed: int, *, train_size: int, validation_size: int) -> Split:
    """Draw both splits; equal arguments give equal splits.

    The validation split does not depend on `train_size`.

    Each unordered pair of operands makes one problem; a coin decides which operand comes first.

    Raises:
        ConfigError: a size is negative, or there are fewer than train_size + validation_size
        problems.
    """
    limit = 10**OPERAND_DIGITS
    pairs = [(a, b) for a in range(limit) for b in range(a, limit)]
    if min(train_size, validation_size) < 0 or train_size + validation_size > len(pairs):
        raise ConfigError(
            f"There are {len(pairs)} problems; got data.train_size={train_size} and data.val_size={validation_size}. "
            f"Set sizes of at least 0 whose sum is at most {len(pairs)}."
        )
    draw = random.Random(seed)  # noqa: S311 - problems, not secrets
    draw.shuffle(pairs)
    problems = [_problem(*pair) if draw.random() < 0.5 else _problem(*reversed(pair)) for pair in pairs]
    return Split(
        train=tuple(problems[validation_size : validation_size + train_size]),
        validation=tuple(problems[:validation_size]),
    )


def make_sums(seed: int, *, train_size: int, validation_size: int) -> Split:
    """The problems of `make_split`, with answers as people write them."""
    split = make_split(seed, train_size=train_size, validation_size=validation_size)
    return Split(train=_as_sums(split.train), validation=_as_sums(split.validation))


def careless_sum(problem: Problem) -> str:
    """`careless_answer` as people write it: 37+45=72."""
    return str(int(careless_answer(problem)[::-1]))


def careless_answer(problem: Problem) -> str:
    """The answer without carries: right for the 3 in 10 problems that have none."""
    a, b = _operands_in_order(problem)
    return _digits_units_first([(x + y) % 10 for x, y in zip(_places(a), _places(b), strict=True)])


def score(response_text: str, ground_truth: str) -> float:
    """1.0 if the response is exactly the answer, else 0.0.

    Args:
        response_text: decoded response without special tokens. Spaces and anything after the answer
        make it wrong.
        ground_truth: `Problem.answer`.
    """
    return float(response_text == ground_truth)


def numbers_of(problem: Problem) -> tuple[int, ...]:
    """The numbers of a prompt, sorted."""
    return tuple(sorted(map(int, re.findall(r"\d+", problem.prompt))))


def _as_sums(problems: tuple[Problem, ...]) -> tuple[Problem, ...]:
    return tuple(Problem(one.prompt, str(sum(numbers_of(one)))) for one in problems)


def _problem(a: int, b: int) -> Problem:
    return Problem(
        prompt=f"{a:0{OPERAND_DIGITS}d}+{b:0{OPERAND_DIGITS}d}=",
        answer=_digits_units_first(_places(a + b)),
    )


def _places(number: int) -> list[int]:
    """Digits of a number, units first, padded to the length of an answer."""
    return [number // 10**place % 10 for place in range(ANSWER_DIGITS)]


def _digits_units_first(places: list[int]) -> str:
    return "".join(str(digit) for digit in places)


def _operands_in_order(problem: Problem) -> tuple[int, int]:
    a, b = re.split(r"[+*]", problem.prompt.removesuffix("="))
    return int(a), int(b)
