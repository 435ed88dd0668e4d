"""Puzzles of Countdown, which `rl_trainer.rewards.countdown` judges."""

from __future__ import annotations

import random
from fractions import Fraction

from rl_trainer.arithmetic import BINARY
from rl_trainer.rewards.countdown import Countdown


def puzzles(seed: int, count: int, size: int = 3, largest: int = 20) -> list[Countdown]:
    """Different puzzles, made from a random expression each, so that there is a solution. Equal arguments give equal puzzles."""
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
