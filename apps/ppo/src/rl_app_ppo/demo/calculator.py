"""The demo task with a tool: "384*592=" is a product that no model of this size knows, and a calculator does.

    prompt 384*592=   policy ?384*592   observation 227328=   policy 227328

Each turn of the policy ends with the end of sequence; `?` begins a call and `!=` is the answer to a bad one. All factors are between 317 and
999, so every product has six digits. The careless answer writes the factors side by side, which is never right: without the tool there is
nothing to gain.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from rl_app_ppo.demo.arithmetic import Problem, Split
from rl_protocol import ConfigError
from rl_trainer import SessionKind
from rl_trainer.agents import Answer, Calculator, Call, Limits, Malformed, ToolAgent

CALL, FAILED, NEXT = "?", "!", "="
SMALLEST, LARGEST = 317, 999
DATA_SOURCE = "three_digit_multiplication"


def make_split(seed: int, *, train_size: int, validation_size: int) -> Split:
    """Draw both splits. Equal arguments give equal splits, and the validation split does not depend on `train_size`.

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
    """The factors side by side."""
    return expression(problem).replace("*", "")


def expression(problem: Problem) -> str:
    """What the calculator is to be asked."""
    return problem.prompt.removesuffix(NEXT)


class Signs:
    """A dialect of single characters (see the head of this module), for a vocabulary that has no words."""

    def calls(self, text: str) -> Sequence[Call | Malformed]:
        """See Dialect.calls."""
        if CALL not in text:
            return []
        before, _, asked = text.partition(CALL)
        return [Malformed("a call is all of a turn") if before else Call("calculator", {"expression": asked})]

    def observation(self, answers: Sequence[Answer]) -> str:
        """See Dialect.observation."""
        return "".join((FAILED if answer.failed else answer.text) + NEXT for answer in answers)


SESSION = SessionKind(ToolAgent([Calculator()], Signs(), Limits(turns=3, turn_tokens=10, observation_tokens=16)).run)


def score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> Mapping[str, float | str]:
    """1 when the last turn is the product and nothing else, otherwise 0.

    Args:
        data_source: not looked at.
        solution_str: all turns and observations; the last turn is what follows the last "=".
        ground_truth: `Problem.answer`.
        extra_info: not looked at.
    """
    del data_source, extra_info
    last = solution_str.rpartition(NEXT)[2]
    right = float(last == ground_truth)
    return {"score": right, "acc": right, "pred": last}
