"""A weighted sum of reward functions: `reward.function=0.8*math,0.2*brief.py:score`.

A term may also be another number that a function returns, `0.2*brief.py:score#form`. A function of
several terms is called once. A term with `@source` counts only for rows of that data source, so
`math@gsm8k,judge.toml@chat` scores each source by its own function.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_protocol import ConfigError
from rl_trainer.rewards.scorer import Failure, Outcome, Sample, Scored, Scorer

_TERM = re.compile(r"(?P<name>.*?(?:\.py:\w+|\.toml)|[^@#]+)(?:#(?P<part>[^@#]+))?(?:@(?P<source>.+))?")
"""A path may contain @."""


@dataclass(frozen=True)
class Term:
    """One number that a reward function returns, in a weighted sum."""

    name: str
    weight: float = 1.0
    part: str = "score"
    source: str = ""
    """data_source of the rows for which it counts; empty: of all."""

    def counts_for(self, data_source: str) -> bool:
        """Whether it counts for rows of a data source."""
        return self.source in ("", data_source)


def parse_terms(text: str, key: str = "function") -> tuple[Term, ...]:
    """Parse a name or a weighted sum, such as `exact_match`, `0.8*math,0.2*brief.py:score#form` or
    `math@gsm8k,judge.toml@chat`.

    Args:
        text: the name or sum.
        key: the option that has it, for messages.

    Raises:
        ConfigError: a name is missing or occurs twice, or a weight is not a finite number.
    """
    terms: list[Term] = []
    for part in (part.strip() for part in text.split(",")):
        weight, star, name = part.partition("*")
        found = _TERM.fullmatch((name if star else part).strip())
        if found is None:
            raise ConfigError(
                f"{key} must name reward functions, or numbers that they return, each once; got {text!r}."
            )
        try:
            value = float(weight) if star else 1.0
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ConfigError(f"{key}: the weight of {part!r} is not a finite number; write 0.5*name.")
        terms.append(Term(found["name"], value, found["part"] or "score", found["source"] or ""))
    named = [(term.name, term.part, term.source) for term in terms]
    if len(set(named)) < len(named):
        raise ConfigError(f"{key} must name reward functions, or numbers that they return, each once; got {text!r}.")
    return tuple(terms)


def functions_of(terms: Sequence[Term]) -> Sequence[str]:
    """The functions of the terms, each once."""
    return list(dict.fromkeys(term.name for term in terms))


def unscored(terms: Sequence[Term], data_source: str) -> str:
    """Why no term counts for rows of a data source; empty: one does."""
    if any(term.counts_for(data_source) for term in terms):
        return ""
    sources = ", ".join(dict.fromkeys(term.source for term in terms))
    return f"has no reward function for data_source={data_source!r}, only for {sources}"


def combine(terms: Sequence[Term], outcomes: Sequence[Outcome]) -> Outcome:
    """Combine the outcomes of the terms for one sample; one failure fails the sum.

    `score` is the sum of weight * number, and `acc` is that of the first term's function. Each
    number of function f is also reported as `f/<name>`.
    """
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

    A scorer gets the samples for which one of its terms counts. A single term of weight 1 returns
    what its function does.

    Args:
        terms: of the sum.
        scorers: of the functions of `functions_of(terms)`.
    """

    def __init__(self, terms: Sequence[Term], scorers: Sequence[Scorer]) -> None:
        self._terms = terms
        self._scorers = dict(zip(functions_of(terms), scorers, strict=True))
        self.reads_tokens = any(scorer.reads_tokens for scorer in scorers)
        self.compares = any(scorer.compares for scorer in scorers)

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        columns = await asyncio.gather(*(self._of(name, samples) for name in self._scorers))
        outcomes = dict(zip(self._scorers, columns, strict=True))
        if len(self._terms) == 1 and self._terms[0] == Term(self._terms[0].name):
            return list(outcomes[self._terms[0].name].values())
        return [self._sum(row, sample, outcomes) for row, sample in enumerate(samples)]

    async def close(self) -> None:
        """Close all scorers."""
        for scorer in self._scorers.values():
            await scorer.close()

    async def _of(self, name: str, samples: Sequence[Sample]) -> dict[int, Outcome]:
        """What a function returns, by number of the sample."""
        terms = [term for term in self._terms if term.name == name]
        rows = [i for i, one in enumerate(samples) if any(term.counts_for(one.data_source) for term in terms)]
        scored = await self._scorers[name].score([samples[row] for row in rows]) if rows else []
        return dict(zip(rows, scored, strict=True))

    def _sum(self, row: int, sample: Sample, outcomes: Mapping[str, Mapping[int, Outcome]]) -> Outcome:
        if why := unscored(self._terms, sample.data_source):
            return Failure(kind="no_number", message=why)
        terms = [term for term in self._terms if term.counts_for(sample.data_source)]
        return combine(terms, [outcomes[term.name][row] for term in terms])
