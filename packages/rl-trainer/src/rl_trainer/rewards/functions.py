"""Calls a reward function in any of its forms, and the simplest reward, `exact_match`.

single   score(data_source, solution_str, ground_truth, extra_info=None) -> number or mapping
         (verl's compute_score)
async    the same as a coroutine function; the calls of a chunk run concurrently
batch    score(data_sources, solution_strs, ground_truths, extra_infos) -> one result per response
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from rl_protocol import ConfigError
from rl_protocol.counted import counted
from rl_trainer.rewards.scorer import Failure, Outcome, Sample, failure_of, outcome_of

Form = Literal["single", "async", "batch"]

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What a reward function is called with, by position, as verl's `compute_score`."""
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""The same for a batch function."""


def form_of(function: Callable[..., Any]) -> Form:
    """How a reward function is called.

    Raises:
        ConfigError: it is not callable, or a coroutine function that takes a batch.
    """
    if not callable(function):
        raise ConfigError(f"A reward function must be callable; got {type(function).__name__}.")
    batch = list(inspect.signature(function).parameters)[:1] == ["data_sources"]
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        if batch:
            raise ConfigError(
                f"The reward function {place_of(function)} is async and takes a batch of responses. An async function scores one: "
                f"give it the parameters ({', '.join(ARGUMENTS)}=None), or write it without async."
            )
        return "async"
    return "batch" if batch else "single"


def misfit(signature: inspect.Signature) -> str:
    """Why a function of this signature can't be called as a reward function; empty: it can.

    The call is by position, so a parameter with the name of an argument must have its place.
    """
    try:
        signature.bind(*ARGUMENTS)
    except TypeError as error:
        return f"is called with {len(ARGUMENTS)} positional arguments, which fails: {error}"
    for given in (ARGUMENTS, BATCH_ARGUMENTS):
        for place, name in enumerate(signature.parameters):
            if name in given and given.index(name) != place:
                return f"is called with ({', '.join(given)}), in this order, but its parameter {place + 1} is {name!r}"
    return ""


def run(function: Callable[..., Any], samples: Sequence[Sample], timeout_s: float) -> list[Outcome]:
    """Score samples in this thread; outcomes are in order.

    `timeout_s` applies only to async functions, and only while they wait.
    """
    match form_of(function):
        case "batch":
            outcomes = _run_batch(function, samples)
        case "async":
            outcomes = asyncio.run(_run_concurrently(function, samples, timeout_s))
        case "single":
            outcomes = [_run_single(function, sample) for sample in samples]
    return _placed(outcomes, function)


def _placed(outcomes: Sequence[Outcome], function: Callable[..., Any]) -> list[Outcome]:
    return [placed(one, function) if isinstance(one, Failure) else one for one in outcomes]


def placed(failure: Failure, function: Callable[..., Any]) -> Failure:
    """The failure with file and line of the function if it has none."""
    return failure if failure.where else msgspec.structs.replace(failure, where=place_of(function))


def place_of(function: Callable[..., Any]) -> str:
    """File and line where a function begins, as `path.py:3`; empty: it is not written in Python."""
    call = inspect.unwrap(function if inspect.isroutine(function) else type(function).__call__)
    code = getattr(call, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


async def _run_concurrently(function: Callable[..., Any], samples: Sequence[Sample], timeout_s: float) -> list[Outcome]:
    return list(await asyncio.gather(*(_run_async(function, sample, timeout_s) for sample in samples)))


def _run_single(function: Callable[..., Any], sample: Sample) -> Outcome:
    try:
        return outcome_of(
            function(sample.data_source, sample.solution_str, sample.ground_truth, dict(sample.extra_info))
        )
    except Exception as error:  # noqa: BLE001 - from user code: the failure of the sample
        return failure_of(error)


async def _run_async(function: Callable[..., Awaitable[Any]], sample: Sample, timeout_s: float) -> Outcome:
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


def _run_batch(function: Callable[..., Sequence[Any]], samples: Sequence[Sample]) -> list[Outcome]:
    columns = zip(*((s.data_source, s.solution_str, s.ground_truth, dict(s.extra_info)) for s in samples), strict=True)
    try:
        returned = list(function(*map(list, columns)))
    except Exception as error:  # noqa: BLE001 - as above
        return [failure_of(error)] * len(samples)
    if len(returned) != len(samples):
        message = f"returned {counted(len(returned), 'result')} for {counted(len(samples), 'response')}"
        return [Failure(kind="no_number", message=message)] * len(samples)
    return [_read(one) for one in returned]


def _read(returned: object) -> Outcome:
    """The outcome of one result of a batch; its own methods may raise."""
    try:
        return outcome_of(returned)
    except Exception as error:  # noqa: BLE001 - as above
        return failure_of(error)


def timed_out(timeout_s: float, parameter: str = "ScorerPool.timeout_s") -> Failure:
    """The failure of a call that exceeded its time limit, which that parameter sets."""
    return Failure(kind="timeout", message=f"did not return within {timeout_s:g} s ({parameter})")


class InlineScorer:
    """Scores in this process without limits, for functions that return quickly."""

    reads_tokens: bool = False

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.compares = form_of(function) == "batch"

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        if form_of(self._function) == "async":
            return _placed(await _run_concurrently(self._function, samples, math.inf), self._function)
        return run(self._function, samples, timeout_s=math.inf)

    async def close(self) -> None:
        """Nothing to release."""


def exact_match(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> Mapping[str, float]:
    """1 if the response equals the ground truth, spaces included, else 0; `acc` is the same."""
    del data_source, extra_info
    right = float(solution_str == ground_truth)
    return {"score": right, "acc": right}
