"""Samples for reward functions, and what scorers return for them in short."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

from trust import trust

from rl_trainer.rewards.scorer import Outcome, Sample, Scored


def samples(*texts: str, truth: str = "t") -> list[Sample]:
    """One sample per response text; all have the same ground truth."""
    return [Sample(data_source="s", solution_str=text, ground_truth=truth, extra_info={"k": 1}) for text in texts]


def write(folder: Path, code: str) -> Path:
    """Write a module of reward functions that may be loaded; returns its path."""
    path = folder / "mine.py"
    path.write_text(textwrap.dedent(code))
    trust(path)
    return path


def scores(outcomes: Iterable[Outcome]) -> list[float | str]:
    """The score of each outcome, or the kind of its failure."""
    return [one.numbers["score"] if isinstance(one, Scored) else one.kind for one in outcomes]
