"""A weighted sum of reward functions: `reward.function=0.8*math,0.2*brief.py:score`.

A term may also be another number that a function returns, `0.2*brief.py:score#form`. A function of
several terms is called once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rl_protocol import ConfigError
from rl_trainer.rewards.scorer import Failure, Outcome, Sample, Scored, Scorer


@dataclass(frozen=True)
class Term:
    """One number that a reward function returns, in a weighted sum."""

    name: str
    weight: float = 1.0
    part: str = "score"


def parse_terms(text: str, key: str = "function") -> tuple[Term, ...]:
    """Parse a name or a weighted sum, such as `exact_match` or `0.8*math,0.2*brief.py:score#form`.

    Args:
        text: the name or sum.
        key: the option that has it, for messages.

    Raises:
        ConfigError: a name is missing or occurs twice, or a weight is not a number.
    """
    terms: list[Term] = []
    for part in (part.strip() for part in text.split(",")):
        weight, star, name = part.partition("*")
        function, sign, number = (name if star else part).strip().partition("#")
        try:
            terms.append(Term(function, float(weight) if star else 1.0, number if sign else "score"))
        except ValueError:
            raise ConfigError(f"{key}: the weight of {part!r} is not a number; write 0.5*name.") from None
    named = [(term.name, term.part) for term in terms]
    if not all(map(all, named)) or len(set(named)) < len(named):
        raise ConfigError(f"{key} must name reward functions, or numbers that they return, each once; got {text!r}.")
    return tuple(terms)


def functions_of(terms: Sequence[Term]) -> Sequence[str]:
    """The functions of the terms, each once."""
    return list(dict.fromkeys(term.name for term in terms))


def combine(terms: Sequence[Term], outcomes: Sequence[Outcome]) -> Outcome:
    """Combine the outcomes of the terms for one sample; one failure fails the sum.

    `score` is the sum of weight * number. With several terms, `acc` is that of the first one's
    function, and each number of function f is also reported as `f/<name>`.
    """
    if len(terms) == 1 and terms[0] == Term(terms[0].name):
        return outcomes[0]
    numbers: dict[str, float] = {}
    texts: dict[str, str] = {}
    score = 0.0
    for term, outcome in zip(terms, outcomes, strict=True):
        if isinstance(outcome, Failure):
            return Failure(kind=outcome.kind, message=f"{term.name}: {outcome.message}", where=outcome.where)
        if term.part not in outcome.numbers:
            message = f"{term.name}: returned no {term.part!r} but {sorted(outcome.numbers)}"
            return Failure(kind="no_number", message=message)
        score += term.weight * outcome.numbers[term.part]
        numbers |= {f"{term.name}/{name}": value for name, value in outcome.numbers.items()}
        texts = outcome.texts | texts
    first = outcomes[0]
    assert isinstance(first, Scored), "failures have returned above"
    return Scored(numbers={"score": score, "acc": first.numbers["acc"], **numbers}, texts=texts)


class CombinedScorer:
    """A weighted sum of scorers, which run concurrently.

    Args:
        terms: of the sum.
        scorers: of the functions of `functions_of(terms)`.
    """

    def __init__(self, terms: Sequence[Term], scorers: Sequence[Scorer]) -> None:
        self._terms = terms
        self._scorers = scorers
        self.reads_tokens = any(scorer.reads_tokens for scorer in scorers)
        self.compares = any(scorer.compares for scorer in scorers)

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        columns = await asyncio.gather(*(scorer.score(samples) for scorer in self._scorers))
        place = {name: i for i, name in enumerate(functions_of(self._terms))}
        places = [place[term.name] for term in self._terms]
        return [combine(self._terms, [row[i] for i in places]) for row in zip(*columns, strict=True)]

    async def close(self) -> None:
        """Close all scorers."""
        for scorer in self._scorers:
            await scorer.close()
