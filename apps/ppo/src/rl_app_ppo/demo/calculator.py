"""The demo task with a tool: products such as "384*592=", beyond a model this small.

The chat template describes the calculator in the prompt. The policy calls it in the dialect of its
chat template (`calculator_chats`), reads the result 227328, and repeats it as its answer. All
factors are between 317 and 999, so every product has six digits. The careless answer writes the
factors side by side, which is never right: without the tool no response scores.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from rl_app_ppo.demo.addition import Problem, Split
from rl_protocol import ConfigError

SMALLEST, LARGEST = 317, 999
DATA_SOURCE = "three_digit_multiplication"


def make_split(seed: int, *, train_size: int, validation_size: int) -> Split:
    """Draw both splits; equal arguments give equal splits.

    The validation split does not depend on `train_size`.

    Raises:
        ConfigError: a size is negative, or there are not that many problems.
    """
    values = LARGEST - SMALLEST + 1
    most, wanted = values * (values + 1) // 4, train_size + validation_size
    if min(train_size, validation_size) < 0 or wanted > most:
        raise ConfigError(
            f"data.train_size={train_size} and data.val_size={validation_size} must be at least 0, and {most} at most together."
        )
    draw = random.Random(seed)  # noqa: S311 - problems, not secrets
    found: dict[tuple[int, int], Problem] = {}
    while len(found) < wanted:
        a, b = draw.randint(SMALLEST, LARGEST), draw.randint(SMALLEST, LARGEST)
        found.setdefault((min(a, b), max(a, b)), Problem(prompt=f"{a}*{b}=", answer=str(a * b)))
    problems = tuple(found.values())
    return Split(train=problems[validation_size:], validation=problems[:validation_size])


def careless_answer(problem: Problem) -> str:
    """The wrong answer that the warm-up teaches: the factors side by side."""
    return expression(problem).replace("*", "")


def expression(problem: Problem) -> str:
    """The expression whose value is the answer."""
    return problem.prompt.removesuffix("=")


def score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> Mapping[str, float | str]:
    """1 if the last turn is exactly the product, else 0.

    Args:
        data_source: ignored.
        solution_str: all turns and observations; the last turn is what follows the last line break,
            with which a chat template opens it.
        ground_truth: `Problem.answer`.
        extra_info: ignored.
    """
    del data_source, extra_info
    last = solution_str.rpartition("\n")[2]
    right = float(last == ground_truth)
    return {"score": right, "acc": right, "pred": last}
