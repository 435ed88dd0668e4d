"""Conformance suite of RewardFunction: subclass it and override `reward` and `cases`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rl_protocol.ports import RewardFunction


class RewardCase(NamedTuple):
    """One call and its expected score."""

    data_source: str
    solution_str: str
    ground_truth: str
    score: float


class RewardFunctionSuite:
    """Tests for a RewardFunction."""

    cases: Sequence[RewardCase] = ()

    def reward(self) -> RewardFunction:
        """The function under test."""
        raise NotImplementedError

    def scores(self, case: RewardCase, extra_info: Mapping[str, object] | None = None) -> dict[str, float]:
        """Call the function, check that all numbers are plain and finite, and return them with
        `score` by name."""
        result = self.reward()(
            data_source=case.data_source,
            solution_str=case.solution_str,
            ground_truth=case.ground_truth,
            extra_info=extra_info,
        )
        named: dict[str, float] = dict(result) if isinstance(result, Mapping) else {"score": result}
        assert "score" in named
        for name, value in named.items():
            assert type(value) in (int, float, bool), f"{name} is a {type(value).__name__}"
            assert math.isfinite(value)
        return named

    def test_the_cases_have_their_scores(self) -> None:
        assert self.cases, "a suite without cases shows nothing"
        for case in self.cases:
            assert self.scores(case)["score"] == case.score

    def test_asking_again_or_in_another_order_changes_nothing(self) -> None:
        first = [self.scores(case) for case in self.cases]
        assert [self.scores(case, {}) for case in reversed(self.cases)][::-1] == first

    def test_any_text_has_a_score(self) -> None:
        for text in ("", "\n", "\u00fc\u4f60\U0001f600", "a" * 100_000, "{}[](*"):
            self.scores(self.cases[0]._replace(solution_str=text))
