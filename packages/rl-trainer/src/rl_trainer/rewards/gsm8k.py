"""GSM8K as verl scores it: the number behind #### is compared with the ground truth as text.

`rl_trainer.rewards.math` compares as mathematics instead, and also accepts answers without ####.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

LAST_CHARACTERS = 300
"""Only this end of a response is searched."""
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> Mapping[str, float | str]:
    """1 when the last number written as `#### 42` is the ground truth, else 0 (verl's method `strict`).

    Thousands separators are removed from the answer before the comparison; nothing else is, so `42.0` is not `42`.

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: the number, without separators.
        extra_info: not used.
    """
    del data_source, extra_info
    found = _MARKED.findall(solution_str[-LAST_CHARACTERS:])
    return _judged(found[-1].replace(",", "") if found else "", ground_truth)


def score_flexible(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> Mapping[str, float | str]:
    """1 when the last number of the response is the ground truth, with or without #### (verl's method `flexible`).

    Separators are compared as they are, as there.
    """
    del data_source, extra_info
    found = [number for number in _NUMBER.findall(solution_str[-LAST_CHARACTERS:]) if number != "."]
    return _judged(found[-1] if found else "", ground_truth)


def _judged(answer: str, ground_truth: str) -> Mapping[str, float | str]:
    right = float(answer != "" and answer == ground_truth)
    return {"score": right, "acc": right, "pred": answer}
