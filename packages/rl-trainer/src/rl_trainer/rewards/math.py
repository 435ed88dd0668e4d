"""GSM8K and MATH: compares the last answer of the response with the ground truth by value.

Uses math-verify (extra `math`) without its time limit, which would report slow answers as wrong;
the process that runs the function has a limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

GSM8K_MARK = "####"
BOXED = "\\boxed"


def score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> Mapping[str, float | str]:
    """1 if the answers are equal, else 0; `acc` is the same, `pred` is the answer that was found.

    The answer is the content of the last \\boxed{}, the text after the last ####, or else the last
    expression of the response. Boxes that stand side by side may also be one answer with several
    values, such as the solutions of an equation.

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: a number or LaTeX, with or without \\boxed{}, or the whole GSM8K solution that
            ends in #### and the number.
        extra_info: not used.

    Raises:
        ValueError: the ground truth can't be parsed.
    """
    del data_source, extra_info
    truth = _last(ground_truth)
    gold = _parse(truth if BOXED in truth else f"\\boxed{{{truth}}}")
    if not gold:
        raise ValueError(f"the ground truth {ground_truth!r} can't be read as mathematics")
    read = [_parse(text) for text in _answers(solution_str)]
    equal = next((found for found in read if found and verify(gold, found, timeout_seconds=None)), None)
    found, right = equal or read[0], float(equal is not None)
    return {"score": right, "acc": right, "pred": str(found[0]) if found else ""}


def _last(text: str) -> str:
    return text.rpartition(GSM8K_MARK)[2].strip() if GSM8K_MARK in text else text


def _answers(response: str) -> list[str]:
    """What may be the answer: the last part between two marks that has boxes, since a mark may also
    be a heading, before it the part from its last box on, if it has several; without boxes the text
    after the last mark.
    """
    boxed = next((part for part in reversed(response.split(GSM8K_MARK)) if BOXED in part), None)
    if boxed is None:
        return [_last(response)]
    return [boxed] if boxed.count(BOXED) == 1 else [boxed[boxed.rfind(BOXED) :], boxed]


def _parse(text: str) -> list[Any]:
    configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    return parse(text, extraction_config=configs, parsing_timeout=cast(int, None))  # no limit
