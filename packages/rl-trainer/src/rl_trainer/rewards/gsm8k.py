"""GSM8K as verl scores it: the number after #### is compared with the ground truth as text.

`rl_trainer.rewards.math` compares by value instead, and also accepts answers without ####.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

LAST_CHARACTERS = 300
"""Only these last characters of a response are searched."""
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> Mapping[str, float | str]:
    """1 if the last number written as `#### 42` is the ground truth, else 0 (`strict` in verl).

    Only thousands separators are removed before the comparison, so `42.0` does not equal `42`.

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: the number, without separators.
        extra_info: not used.
    """
    del data_source, extra_info
    found = _MARKED.findall(solution_str[-LAST_CHARACTERS:])
    return _result(found[-1].replace(",", "") if found else "", ground_truth)


def score_flexible(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> Mapping[str, float | str]:
    """1 if the last number of the response is the ground truth, else 0 (`flexible` in verl).

    Thousands separators are not removed, as in verl.
    """
    del data_source, extra_info
    found = [number for number in _NUMBER.findall(solution_str[-LAST_CHARACTERS:]) if number != "."]
    return _result(found[-1] if found else "", ground_truth)


def _result(answer: str, ground_truth: str) -> Mapping[str, float | str]:
    right = float(answer != "" and answer == ground_truth)
    return {"score": right, "acc": right, "pred": answer}
