"""A weighted sum of reward functions: `reward.function=0.8*math,0.2*brief.py:score`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rl_protocol import ConfigError
from rl_trainer.rewards.scorer import Failure, Outcome, Sample, Scored, Scorer


@dataclass(frozen=True)
class Term:
    """One reward function of a weighted sum."""

    name: str
    weight: float = 1.0


def parse_terms(text: str, key: str = "function") -> tuple[Term, ...]:
    """Parse a name or a weighted sum, such as `exact_match` or `0.8*math,0.2*brief.py:score`.

    Args:
        text: the name or sum.
        key: the option that has it, for messages.

    Raises:
        ConfigError: a name is missing or occurs twice, or a weight is not a number.
    """
    terms: list[Term] = []
    for part in (part.strip() for part in text.split(",")):
        weight, star, name = part.partition("*")
        try:
            terms.append(Term(name.strip(), float(weight)) if star else Term(part))
        except ValueError:
            raise ConfigError(f"{key}: the weight of {part!r} is not a number; write 0.5*name.") from None
    names = [term.name for term in terms]
    if not all(names) or len(set(names)) < len(names):
        raise ConfigError(f"{key} must name reward functions, each once; got {text!r}.")
    return tuple(terms)


def combine(terms: Sequence[Term], outcomes: Sequence[Outcome]) -> Outcome:
    """Combine the outcomes of the functions for one sample; one failure fails the sum.

    `score` is the sum of weight * score. With several functions, `acc` is that of the first, and
    each number of function f is also reported as `f/<name>`.
    """
    if len(terms) == 1 and terms[0].weight == 1.0:
        return outcomes[0]
    numbers: dict[str, float] = {}
    texts: dict[str, str] = {}
    score = 0.0
    for term, outcome in zip(terms, outcomes, strict=True):
        if isinstance(outcome, Failure):
            return Failure(kind=outcome.kind, message=f"{term.name}: {outcome.message}", where=outcome.where)
        score += term.weight * outcome.numbers["score"]
        numbers |= {f"{term.name}/{name}": value for name, value in outcome.numbers.items()}
        texts = outcome.texts | texts
    first = outcomes[0]
    assert isinstance(first, Scored), "failures have returned above"
    return Scored(numbers={"score": score, "acc": first.numbers["acc"], **numbers}, texts=texts)


class CombinedScorer:
    """A weighted sum of scorers, which run concurrently."""

    def __init__(self, terms: Sequence[Term], scorers: Sequence[Scorer]) -> None:
        self._terms = terms
        self._scorers = scorers
        self.reads_tokens = any(scorer.reads_tokens for scorer in scorers)
        self.compares = any(scorer.compares for scorer in scorers)

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        columns = await asyncio.gather(*(scorer.score(samples) for scorer in self._scorers))
        return [combine(self._terms, row) for row in zip(*columns, strict=True)]

    async def close(self) -> None:
        """Close all scorers."""
        for scorer in self._scorers:
            await scorer.close()
