"""The demo task with a tool: products such as "384*592=", beyond a model this small.

    prompt 384*592=   policy ?384*592   observation 227328=   policy 227328

Each turn of the policy ends with the end of sequence; `?` begins a call, and `!=` answers a
malformed one. All factors are between 317 and 999, so every product has six digits. The careless
answer writes the factors side by side, which is never right: without the tool no response scores.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from rl_app_ppo.demo.addition import Problem, Split
from rl_protocol import ConfigError
from rl_trainer import SessionKind
from rl_trainer.rollout.agents import Answer, Calculator, Call, Limits, Malformed, ToolAgent

CALL, FAILED, NEXT = "?", "!", "="
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
    """The call of the calculator that solves the problem."""
    return problem.prompt.removesuffix(NEXT)


class Signs:
    """A dialect of single characters, for a vocabulary without words; see the module docstring."""

    def calls(self, text: str) -> Sequence[Call | Malformed]:
        if CALL not in text:
            return []
        before, _, asked = text.partition(CALL)
        return [Malformed("a call must be the whole turn") if before else Call("calculator", {"expression": asked})]

    def observation(self, answers: Sequence[Answer]) -> str:
        return "".join((FAILED if answer.failed else answer.text) + NEXT for answer in answers)


SESSION = SessionKind(ToolAgent([Calculator()], Signs(), Limits(turns=3, turn_tokens=10, observation_tokens=16)).run)


def score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> Mapping[str, float | str]:
    """1 if the last turn is exactly the product, else 0.

    Args:
        data_source: ignored.
        solution_str: all turns and observations; the last turn is what follows the last "=".
        ground_truth: `Problem.answer`.
        extra_info: ignored.
    """
    del data_source, extra_info
    last = solution_str.rpartition(NEXT)[2]
    right = float(last == ground_truth)
    return {"score": right, "acc": right, "pred": last}
