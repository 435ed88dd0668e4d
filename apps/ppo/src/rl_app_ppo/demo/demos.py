"""The built-in tasks by name: their problems, their tokens, and what the warm-up shows a model of each. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rl_app_ppo.demo import arithmetic, calculator
from rl_app_ppo.demo.arithmetic import Problem, Split
from rl_app_ppo.demo.vocabulary import VOCABULARY


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of a response."""

    text: str
    told: bool = False
    """An observation: the model is shown it, and not taught to write it. Otherwise a turn of its own, which the end of sequence closes."""


class MakeSplit(Protocol):
    """Draws the problems of a task."""

    def __call__(self, seed: int, *, train_size: int, validation_size: int) -> Split: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """One task."""

    title: str
    """What the task is, with an example."""
    note: str = ""
    """How answers are to be read, where that is unusual."""
    data_source: str
    make_split: MakeSplit
    right: Callable[[Problem], Sequence[Piece]]
    """The response that is right."""
    careless: Callable[[Problem], Sequence[Piece]]
    """The response of the bad habit that training is to remove."""
    vocabulary: tuple[str, ...] = VOCABULARY
    """Tokens by id; those of VOCABULARY come first."""
    careless_share: float
    target_probability: float
    """How the warm-up mixes the two, and where it ends; see WarmUpSettings."""


def _with_the_tool(problem: Problem) -> Sequence[Piece]:
    call = Piece(calculator.CALL + calculator.expression(problem))
    return [call, Piece(problem.answer + calculator.NEXT, told=True), Piece(problem.answer)]


DEMOS: Mapping[str, Demo] = {
    "addition": Demo(
        title="two-digit addition, answers written units first (37+45= is answered by 280, that is 082)",
        note="answers are written units first: 280 is the number 082",
        data_source=arithmetic.DATA_SOURCE,
        make_split=arithmetic.make_split,
        right=lambda problem: [Piece(problem.answer)],
        careless=lambda problem: [Piece(arithmetic.careless_answer(problem))],
        careless_share=0.75,
        target_probability=0.43,
    ),
    "calculator": Demo(
        title="products of three-digit numbers with a calculator as a tool (384*592= is answered by 227328)",
        data_source=calculator.DATA_SOURCE,
        make_split=calculator.make_split,
        right=_with_the_tool,
        careless=lambda problem: [Piece(calculator.careless_answer(problem))],
        vocabulary=(*VOCABULARY, "*", calculator.CALL, calculator.FAILED),
        careless_share=0.8,
        target_probability=0.14,
    ),
}
