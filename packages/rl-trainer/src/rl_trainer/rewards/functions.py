"""Reward functions: the forms they come in, and several as a weighted sum.

single   score(data_source, solution_str, ground_truth, extra_info=None) -> number or mapping       (verl's compute_score)
async    the same as a coroutine function: the calls of a chunk wait side by side
batch    score(data_sources, solution_strs, ground_truths, extra_infos) -> one result per response
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl_protocol import ConfigError
from rl_trainer.rewards.outcomes import Failure, Outcome, Sample, Scored, Scorer, failure_of, outcome_of

Form = Literal["single", "async", "batch"]


@dataclass(frozen=True)
class Term:
    """One reward function of a weighted sum."""

    name: str
    weight: float = 1.0


def parse_terms(text: str) -> tuple[Term, ...]:
    """`name`, or a weighted sum: `exact_match`, `0.8*math,0.2*brief.py:score`.

    Raises:
        ConfigError: no name, a weight that is no number, or a name that occurs twice.
    """
    terms: list[Term] = []
    for part in (part.strip() for part in text.split(",")):
        weight, star, name = part.partition("*")
        try:
            terms.append(Term(name.strip(), float(weight)) if star else Term(part))
        except ValueError:
            raise ConfigError(f"reward.function: the weight of {part!r} is no number; write 0.5*name.") from None
    names = [term.name for term in terms]
    if not all(names) or len(set(names)) < len(names):
        raise ConfigError(f"reward.function must name reward functions, each once; got {text!r}.")
    return tuple(terms)


def form_of(function: Callable[..., Any]) -> Form:
    """How it is called.

    Raises:
        ConfigError: it can't be called at all.
    """
    if not callable(function):
        raise ConfigError(f"A reward function must be callable; got {type(function).__name__}.")
    call = function if inspect.isroutine(function) else type(function).__call__
    if inspect.iscoroutinefunction(call):
        return "async"
    names = list(inspect.signature(function).parameters)
    return "batch" if names[:1] == ["data_sources"] else "single"


def run(function: Callable[..., Any], samples: Sequence[Sample], timeout_s: float) -> list[Outcome]:
    """Outcomes of samples in this thread, in order. Only an async function is held to `timeout_s` here, and only while it waits."""
    match form_of(function):
        case "batch":
            return _batch(function, samples)
        case "async":
            return asyncio.run(_side_by_side(function, samples, timeout_s))
        case "single":
            return [_one(function, sample) for sample in samples]


async def _side_by_side(function: Callable[..., Any], samples: Sequence[Sample], timeout_s: float) -> list[Outcome]:
    return list(await asyncio.gather(*(_waited(function, sample, timeout_s) for sample in samples)))


def _one(function: Callable[..., Any], sample: Sample) -> Outcome:
    try:
        return outcome_of(
            function(sample.data_source, sample.solution_str, sample.ground_truth, dict(sample.extra_info))
        )
    except Exception as error:  # noqa: BLE001 - the boundary to code of others: whatever it raises is that sample's failure
        return failure_of(error)


async def _waited(function: Callable[..., Awaitable[Any]], sample: Sample, timeout_s: float) -> Outcome:
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return outcome_of(
                await function(sample.data_source, sample.solution_str, sample.ground_truth, dict(sample.extra_info))
            )
    except Exception as error:  # noqa: BLE001 - as above
        if isinstance(error, TimeoutError) and limit.expired():
            return timed_out(timeout_s)
        return failure_of(error)


def _batch(function: Callable[..., Sequence[Any]], samples: Sequence[Sample]) -> list[Outcome]:
    columns = zip(*((s.data_source, s.solution_str, s.ground_truth, dict(s.extra_info)) for s in samples), strict=True)
    try:
        returned = list(function(*map(list, columns)))
    except Exception as error:  # noqa: BLE001 - as above
        return [failure_of(error)] * len(samples)
    if len(returned) != len(samples):
        message = f"returned {len(returned)} results for {len(samples)} responses"
        return [Failure(kind="no_number", message=message)] * len(samples)
    return [outcome_of(one) for one in returned]


def timed_out(timeout_s: float) -> Failure:
    """It took too long."""
    return Failure(kind="timeout", message=f"did not return within {timeout_s:g} s (reward.timeout_s)")


def combine(terms: Sequence[Term], outcomes: Sequence[Outcome]) -> Outcome:
    """The weighted sum of what the functions said of one sample; one that failed fails the whole.

    `score` is the sum of weight * score. Of a sum of several, `acc` is that of the first, and every number and text of function f is also
    there as `f/number`.
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


class InlineScorer:
    """Scores in this process, without any limit: for functions, not async ones, that are known to be harmless."""

    reads_tokens: bool = False

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """See Scorer."""
        return run(self._function, samples, timeout_s=math.inf)

    async def close(self) -> None:
        """Nothing is held."""


class CombinedScorer:
    """A weighted sum of scorers."""

    def __init__(self, terms: Sequence[Term], scorers: Sequence[Scorer]) -> None:
        self._terms = terms
        self._scorers = scorers
        self.reads_tokens = any(scorer.reads_tokens for scorer in scorers)

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """See Scorer; the functions run side by side."""
        columns = await asyncio.gather(*(scorer.score(samples) for scorer in self._scorers))
        return [combine(self._terms, row) for row in zip(*columns, strict=True)]

    async def close(self) -> None:
        """Close all."""
        for scorer in self._scorers:
            await scorer.close()
