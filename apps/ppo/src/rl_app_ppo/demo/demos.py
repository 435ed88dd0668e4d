"""The demo tasks by name: problems, vocabulary and warm-up targets. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rl_app_ppo.demo import addition, calculator
from rl_app_ppo.demo.addition import Problem, Split
from rl_app_ppo.demo.tokenizer import VOCABULARY


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a response."""

    text: str
    observed: bool = False
    """An observation, which gets no loss; otherwise a turn, which ends with the end of sequence."""


class MakeSplit(Protocol):
    """Draws the problems of a task."""

    def __call__(self, seed: int, *, train_size: int, validation_size: int) -> Split: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """One demo task."""

    title: str
    """Description with an example."""
    note: str = ""
    """How to read the answers, if it is unusual."""
    data_source: str
    make_split: MakeSplit
    right: Callable[[Problem], Sequence[Piece]]
    """The right response."""
    careless: Callable[[Problem], Sequence[Piece]]
    """The wrong response that the warm-up teaches and training removes."""
    vocabulary: tuple[str, ...] = VOCABULARY
    """Tokens by id; those of VOCABULARY come first."""
    careless_share: float
    target_probability: float
    """Mix and end of the warm-up; see WarmUpSettings."""


def _with_the_tool(problem: Problem) -> Sequence[Piece]:
    call = Piece(calculator.CALL + calculator.expression(problem))
    return [call, Piece(problem.answer + calculator.NEXT, observed=True), Piece(problem.answer)]


DEMOS: Mapping[str, Demo] = {
    "sums": Demo(
        title="two-digit addition (37+45= is answered by 82)",
        data_source=addition.SUMS_DATA_SOURCE,
        make_split=addition.make_sums,
        right=lambda problem: [Piece(problem.answer)],
        careless=lambda problem: [Piece(addition.careless_sum(problem))],
        careless_share=0.75,
        target_probability=0.43,
    ),
    "addition": Demo(
        title="two-digit addition, answers written units first (37+45= is answered by 280, that is 082)",
        note="answers are written units first: 280 is the number 082",
        data_source=addition.DATA_SOURCE,
        make_split=addition.make_split,
        right=lambda problem: [Piece(problem.answer)],
        careless=lambda problem: [Piece(addition.careless_answer(problem))],
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
