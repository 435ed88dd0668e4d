"""What a judge is asked, and the score in its answer. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from rl_protocol.errors import UNREADABLE
from rl_trainer.rewards.scorer import Failure, Outcome, Sample, outcome_of
from rl_trainer.rewards.scorer_toml import JudgeConfig

PLACES = ("prompt", "response", "ground_truth", "data_source")
"""What `{name}` in a rubric may stand for."""
_PLACE = re.compile(r"\{(" + "|".join(PLACES) + r")\}")


def question(rubric: str, sample: Sample) -> str:
    """The rubric with the sample's texts in their places.

    Braces in these texts stand for nothing.

    >>> sample = Sample(data_source="d", solution_str="{prompt}", ground_truth="", prompt_str="2")
    >>> question("{prompt} -> {response}", sample)
    '2 -> {prompt}'
    """
    texts = {
        "prompt": sample.prompt_str,
        "response": sample.solution_str,
        "ground_truth": sample.ground_truth,
        "data_source": sample.data_source,
    }
    return _PLACE.sub(lambda place: texts[place[1]], rubric)


def verdict(answer: str, judge: JudgeConfig) -> Outcome:
    """The score in a judge's answer, from [lowest, highest] to [0, 1].

    With `score_field`, the answer contains a JSON object; its other numbers are returned by their
    names, on the same scale. Otherwise the score is group 1 of the last match of `score_pattern`.
    An answer without a score, or with one outside the scale, is a Failure.
    """
    found = _fields(answer) if judge.score_field else _matched(answer, judge.score_pattern)
    if isinstance(found, Failure):
        return found
    if judge.score_field and judge.score_field not in found:
        return _unclear(f"has no number {judge.score_field!r} (score_field)", answer)
    outside = [name for name, value in found.items() if not judge.lowest <= value <= judge.highest]
    if outside:
        what = f"has {outside[0]} {found[outside[0]]:g}, which is not in {judge.lowest:g}..{judge.highest:g} (lowest, highest)"
        return _unclear(what, answer)
    span = judge.highest - judge.lowest
    scaled = {name: (value - judge.lowest) / span for name, value in found.items()}
    score = scaled.pop(judge.score_field or "score")
    return outcome_of({**scaled, "score": score, "judgement": answer})


def _matched(answer: str, pattern: str) -> dict[str, float] | Failure:
    """The number in the last match of the pattern, as `score`."""
    matches = [match[1] for match in re.finditer(pattern, answer) if match[1] is not None]
    if not matches:
        return _unclear("has no match of score_pattern", answer)
    try:
        return {"score": float(matches[-1])}
    except ValueError:
        return _unclear(f"has {matches[-1]!r} where score_pattern finds the score", answer)


def _fields(answer: str) -> dict[str, float] | Failure:
    """The numbers of the JSON object in a text, such as a code block."""
    inner = answer[answer.find("{") : answer.rfind("}") + 1]
    try:
        values: Mapping[str, Any] = msgspec.json.decode(inner.encode("utf-8", "replace"), type=dict[str, Any])
    except UNREADABLE:
        return _unclear("has no JSON object", answer)
    return {name: _as_float(value) for name, value in values.items() if type(value) in (int, float)}


def _as_float(value: int | float) -> float:
    """The number; infinite where float64 does not reach it."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _unclear(what: str, answer: str) -> Failure:
    return Failure(kind="no_number", message=f"the answer {what}: {answer[-200:]!r}")
