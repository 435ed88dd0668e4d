"""Chooses the trajectories of a step that a run records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rl_protocol import RowKey

RULE = (
    "whole groups of a prompt, at most {count} trajectories in every step that LoopConfig.sample_freq={freq} selects: the "
    "group with the worst mean score, the best, a random one, the one with the oldest weights (asynchronous runs), "
    "the one with the token whose log-probs in rollout and trainer differ most, then further random ones; and the "
    "first {failed} trajectories whose reward failed. Random choices and ties follow LoopConfig.seed"
)
"""The rule of `choose`, as the report prints it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A chosen group: its rows, and why."""

    rows: tuple[int, ...]
    why: str


def choose(
    keys: Sequence[str],
    scores: Sequence[float],
    versions: Sequence[int],
    gaps: Sequence[float],
    count: int,
    seed: Sequence[int],
) -> list[Choice]:
    """Choose whole groups with at most `count` rows in all, and at least one group.

    Args:
        keys: [N] names of the rows.
        scores: [N].
        versions: [N] the oldest weights that generated each row; empty: all the same.
        gaps: [N] the largest difference between rollout and trainer in each row; empty: unknown.
        count: see above.
        seed: of the random choices.
    """
    groups: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(RowKey.parse(key).uid, []).append(row)
    shuffled = [list(groups.values())[i] for i in np.random.default_rng(list(seed)).permutation(len(groups))]
    chosen: list[Choice] = []
    left = count
    for group, why in _ranked(shuffled, scores, versions, gaps):
        if chosen and len(group) > left:
            break
        chosen.append(Choice(rows=tuple(group), why=why))
        left -= len(group)
    return chosen


def _ranked(
    groups: list[list[int]], scores: Sequence[float], versions: Sequence[int], gaps: Sequence[float]
) -> Iterator[tuple[list[int], str]]:
    """All groups in the order of choice; each once."""

    def mean(group: list[int]) -> float:
        return sum(scores[row] for row in group) / len(group)

    def take(group: list[int], why: str) -> tuple[list[int], str]:
        groups.remove(group)
        return group, why

    if groups:
        yield take(min(groups, key=mean), "worst")
    if groups:
        yield take(max(groups, key=mean), "best")
    if groups:
        yield take(groups[0], "random")
    if groups and len(set(versions)) > 1:
        yield take(min(groups, key=lambda group: min(versions[row] for row in group)), "stale")
    if groups and len(gaps):
        yield take(max(groups, key=lambda group: max(gaps[row] for row in group)), "gap")
    while groups:
        yield take(groups[0], "random")
