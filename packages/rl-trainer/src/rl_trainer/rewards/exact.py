"""The simplest reward."""

from __future__ import annotations

from collections.abc import Mapping


def exact_match(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> Mapping[str, float]:
    """1 when the response is exactly the right answer, else 0; `acc` is the same. Spaces make it wrong."""
    del data_source, extra_info
    right = float(solution_str == ground_truth)
    return {"score": right, "acc": right}
