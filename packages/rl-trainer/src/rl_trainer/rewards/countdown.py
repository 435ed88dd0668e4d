"""Countdown: reach a target with +, -, * and / from given numbers, each used at most once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import msgspec

from rl_trainer.rewards.arithmetic import BINARY, evaluate


@dataclass(frozen=True, slots=True)
class Countdown:
    """One puzzle."""

    numbers: tuple[int, ...]
    target: int


def score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> Mapping[str, float | str]:
    """1 for an expression that reaches the target, 0.1 for another valid one, else 0.

    Args:
        data_source: not used.
        solution_str: the response; the expression is its last non-empty line, up to an = sign.
        ground_truth: JSON with `numbers` and `target`.
        extra_info: not used.
    """
    del data_source, extra_info
    puzzle = msgspec.json.decode(ground_truth, type=Countdown)
    lines = [line for line in solution_str.splitlines() if line.strip()]
    text = lines[-1].partition("=")[0].strip() if lines else ""
    value = _value(text, puzzle.numbers)
    right = float(value == puzzle.target)
    return {"score": 1.0 if right else 0.1 if value is not None else 0.0, "acc": right, "pred": str(value)}


def _value(text: str, numbers: Sequence[int]) -> Fraction | None:
    """The value of the expression; None if it is invalid or uses other numbers."""
    used = Counter[int]()

    def number(found: int | float) -> Fraction:
        if not isinstance(found, int):
            raise ValueError(f"{found} is not an integer")
        used[found] += 1
        return Fraction(found)

    try:
        value = evaluate(text, BINARY, number)
    except (ValueError, ZeroDivisionError):
        return None
    return value if used <= Counter(numbers) else None
