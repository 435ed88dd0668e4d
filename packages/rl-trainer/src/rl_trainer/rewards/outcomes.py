"""What is asked of a reward function, and what becomes of it: numbers, or a failure with a name. Neither is ever a 0 that nobody gave."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, cast

import msgspec
import numpy as np

_LONGEST = 2000
"""Characters that are kept of a text."""
FailureKind = Literal["exception", "timeout", "died", "no_number"]


class Sample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One response to be scored."""

    data_source: str
    solution_str: str
    ground_truth: str
    extra_info: dict[str, Any] = {}
    tokens: list[int] = []
    """Of prompt and response; empty unless the scorer reads them."""


class Scored(msgspec.Struct, frozen=True, kw_only=True, tag="scored"):
    """What the function said."""

    numbers: dict[str, float]
    """`score`, `acc`, and whatever else it named."""
    texts: dict[str, str] = {}
    """What it said in words, such as `pred`, the answer it found in the response."""


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag="failure", omit_defaults=True):
    """Why there is no score."""

    kind: FailureKind
    message: str
    where: str = ""
    """File and line of the reward function where it raised an exception, as `path.py:3`."""

    @property
    def said(self) -> str:
        """The message, with file and line."""
        return f"{self.message} ({self.where})" if self.where else self.message


Outcome = Scored | Failure


class Scorer(Protocol):
    """Scores responses. Never raises for what a reward function does; one outcome per sample, in order."""

    @property
    def reads_tokens(self) -> bool:
        """Whether it looks at `Sample.tokens`."""
        ...

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]: ...

    async def close(self) -> None:
        """Release what it holds; safe to call twice."""
        ...


def outcome_of(returned: object) -> Outcome:
    """Check what a reward function returned for one sample: a finite number, or a mapping of names to finite numbers and texts with `score`.

    `acc` is the score where it names none.
    """
    named = cast(Mapping[str, Any], returned) if isinstance(returned, Mapping) else {"score": returned}
    numbers: dict[str, float] = {}
    texts: dict[str, str] = {}
    for name, value in named.items():
        if isinstance(value, str) and name not in ("score", "acc"):
            texts[name] = value[:_LONGEST]
        elif isinstance(value, bool | int | float | np.number | np.bool_) and math.isfinite(value):
            numbers[name] = float(value)
        else:
            what = "" if name == "score" else f" as {name!r}"
            return Failure(kind="no_number", message=f"returned {value!r}{what}; it must return a finite number")
    if "score" not in numbers:
        return Failure(kind="no_number", message=f"returned no 'score' but {sorted(named)}")
    return Scored(numbers={"acc": numbers["score"], **numbers}, texts=texts)


def failure_of(error: BaseException) -> Failure:
    """Of an exception that a reward function raised and its caller caught."""
    message = f"raised {type(error).__name__}: {error}"[:_LONGEST]
    return Failure(kind="exception", message=message, where=_where(error))


def _where(error: BaseException) -> str:
    """The innermost line, in the file of the function that was called, that the exception passed; empty where the call itself failed."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the caller's
    lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]
    return f"{frames[0].filename}:{lines[-1]}" if frames else ""
