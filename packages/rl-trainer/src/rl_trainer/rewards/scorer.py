"""The scorer interface: samples in, scores or failures out.

A failed call is never reported as a score of 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, cast

import msgspec
import numpy as np

from rl_protocol.errors import described_error, place_of_error

_LARGEST = float(np.finfo(np.float32).max)
_LONGEST = 2000
"""Texts are cut to this number of characters."""
_SHOWN = 200
"""Most characters of a wrong result in a message."""
FailureKind = Literal["exception", "timeout", "died", "no_number"]


class Sample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One response to be scored."""

    data_source: str
    solution_str: str
    ground_truth: str
    extra_info: dict[str, Any] = {}
    tokens: list[int] = []
    """Token ids of prompt and response; empty unless the scorer reads them."""
    prompt_str: str = ""
    """The prompt as text, without special tokens; empty unless the scorer reads tokens."""


class Scored(msgspec.Struct, frozen=True, kw_only=True, tag="scored"):
    """The result of a reward function."""

    numbers: dict[str, float]
    """`score`, `acc`, and any other numbers that the function returned."""
    texts: dict[str, str] = {}
    """Texts that the function returned, such as `pred`, the answer found in the response."""


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag="failure", omit_defaults=True):
    """Why there is no score."""

    kind: FailureKind
    message: str
    where: str = ""
    """File and line where the reward function raised an exception, or where it begins, as
    `path.py:3`.
    """

    @property
    def description(self) -> str:
        """The message with file and line."""
        return f"{self.message} ({self.where})" if self.where else self.message


Outcome = Scored | Failure


class Scorer(Protocol):
    """Scores responses: one outcome per sample, in order.

    Errors of the reward function are outcomes; they are never raised.
    """

    @property
    def reads_tokens(self) -> bool:
        """Whether it needs `Sample.tokens` or `Sample.prompt_str`."""
        ...

    @property
    def compares(self) -> bool:
        """Whether an outcome may depend on the other samples of the call, also by rounding."""
        ...

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]: ...

    async def close(self) -> None:
        """Release what it holds; safe to call twice."""
        ...


def outcome_of(returned: object) -> Outcome:
    """Check the result of a reward function for one sample.

    Valid are a number that is finite in float32, and a mapping of names to such numbers and texts
    that contains `score`. An array or tensor without dimensions is a number. `acc` defaults to the
    score.
    """
    if type(returned) is float and abs(returned) <= _LARGEST:
        return Scored(numbers={"acc": returned, "score": returned})
    named = cast(Mapping[str, Any], returned) if isinstance(returned, Mapping) else {"score": cast(Any, returned)}
    numbers: dict[str, float] = {}
    texts: dict[str, str] = {}
    for name, got in named.items():
        if type(got) is float and type(name) is str and abs(got) <= _LARGEST:  # mostly
            numbers[name] = got
            continue
        if not isinstance(cast(object, name), str):
            return Failure(kind="no_number", message=f"returned a result named {name!r}; names must be texts")
        value = cast(Any, got).item() if getattr(got, "ndim", None) == 0 else got  # numpy's scalars and torch's
        if isinstance(value, str) and name not in ("score", "acc"):
            texts[name] = _as_utf8(value[:_LONGEST])
        elif isinstance(value, bool | int | float | np.number | np.bool_) and abs(value) <= _LARGEST:
            numbers[name] = float(value)
        else:
            what = "" if name == "score" else f" as {name!r}"
            finite = isinstance(value, int | float) and abs(value) < math.inf
            limit = " of at most 3.4e38 (float32)" if finite else ""
            message = f"returned {_shown(got)}{what}; it must return a finite number{limit}"
            return Failure(kind="no_number", message=_printable(message))
    if "score" not in numbers:
        return Failure(kind="no_number", message=_printable(f"returned no 'score' but {_shown(sorted(named))}"))
    return Scored(numbers={"acc": numbers["score"], **numbers}, texts=texts)


def failure_of(error: BaseException) -> Failure:
    """The failure for an exception of a reward function; call it in the except block."""
    message = f"raised {described_error(error)}"[:_LONGEST]
    if isinstance(error, MemoryError):  # mostly without a message
        message = f"{message.rstrip(': ')} (the limit is ScorerPool.memory_mb)"
    return Failure(kind="exception", message=_printable(message), where=place_of_error(error))


def _shown(value: object) -> str:
    """The start of what a function returned, which may be a whole response."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _printable(text: str) -> str:
    """The text with a ? for each control character, such as those that move a terminal's cursor,
    and each lone surrogate.
    """
    return "".join(char if char.isprintable() or char in "\n\t" else "?" for char in text)


def _as_utf8(text: str) -> str:
    """The text with a ? for each lone surrogate, which a function may have read from an escape in a
    response, and no message between processes can hold.
    """
    return text.encode("utf-8", "replace").decode()
