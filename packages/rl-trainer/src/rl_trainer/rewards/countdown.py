"""Countdown: reach a number with +, -, * and / from some numbers, each used at most once. Responses are judged, and nothing is executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import msgspec

from rl_trainer.arithmetic import BINARY, evaluate


@dataclass(frozen=True, slots=True)
class Countdown:
    """One puzzle."""

    numbers: tuple[int, ...]
    target: int


def score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> Mapping[str, float | str]:
    """1 for an expression that reaches the target, 0.1 for one that uses the numbers rightly and does not, else 0. Nothing is executed.

    Args:
        data_source: not looked at.
        solution_str: the response; its last line that is not empty is the expression, what follows an = is left out.
        ground_truth: JSON with `numbers` and `target`.
        extra_info: not looked at.
    """
    del data_source, extra_info
    puzzle = msgspec.json.decode(ground_truth, type=Countdown)
    lines = [line for line in solution_str.splitlines() if line.strip()]
    text = lines[-1].partition("=")[0].strip() if lines else ""
    value = _value(text, puzzle.numbers)
    right = float(value == puzzle.target)
    return {"score": 1.0 if right else 0.1 if value is not None else 0.0, "acc": right, "pred": str(value)}


def _value(text: str, numbers: Sequence[int]) -> Fraction | None:
    """Of the expression; None where it is none, or does not use the numbers as it may."""
    used = Counter[int]()

    def number(found: int | float) -> Fraction:
        if not isinstance(found, int):
            raise ValueError(f"{found} is no whole number")
        used[found] += 1
        return Fraction(found)

    try:
        value = evaluate(text, BINARY, number)
    except (ValueError, ZeroDivisionError):
        return None
    return value if used <= Counter(numbers) else None
