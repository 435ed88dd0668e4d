"""The demo tasks by name: problems, vocabulary and warm-up targets. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl_app_ppo.demo import addition, calculator, countdown
from rl_app_ppo.demo.addition import Problem, Split
from rl_app_ppo.demo.calculator_chats import LLAMA3, QWEN, TOOL, Chat
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
    template: str = ""
    """Chat template of the model; empty: prompts are plain text."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Descriptions of the tools in the prompts of the warm-up."""
    careless_share: float
    target_probability: float
    """Mix and end of the warm-up; see WarmUpSettings."""


def _with_calculator(chat: Chat) -> Demo:
    """The task for a model that talks so."""

    def right(problem: Problem) -> Sequence[Piece]:
        call = Piece(chat.written(calculator.expression(problem)))
        return [call, Piece(chat.observation(problem.answer), observed=True), Piece(problem.answer)]

    return Demo(
        title=f"products of three-digit numbers with a calculator as a tool, called in the dialect {chat.dialect} (384*592= is answered by 227328)",
        data_source=calculator.DATA_SOURCE,
        make_split=calculator.make_split,
        right=right,
        careless=lambda problem: [Piece(calculator.careless_answer(problem))],
        vocabulary=chat.vocabulary,
        template=chat.template,
        tools=(TOOL,),
        careless_share=0.8,
        target_probability=0.14,
    )


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
    "countdown": Demo(
        title="Countdown (3 5 2 make 17: is answered by 3*5+2)",
        data_source=countdown.DATA_SOURCE,
        make_split=countdown.make_split,
        right=lambda problem: [Piece(countdown.solution(problem))],
        careless=lambda problem: [Piece(countdown.careless_answer(problem))],
        vocabulary=(*VOCABULARY, *countdown.WORDS),
        careless_share=0.7,
        target_probability=0.25,
    ),
    "calculator": _with_calculator(QWEN),
    "calculator_llama3": _with_calculator(LLAMA3),
}
