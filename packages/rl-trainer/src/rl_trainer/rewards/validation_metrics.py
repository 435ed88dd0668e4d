"""Validation metrics by data source, under verl's names. Numpy only.

Each prompt has n sessions with values v_1..v_n. `val-core/<source>/acc/...` holds the main metrics
(with the largest n), `val-aux/...` the others.

    mean@n          mean over sessions, then over prompts
    std@n           standard deviation over the sessions of a prompt, then the mean over prompts
    best@k/mean     best of k sessions drawn with replacement, by bootstrap: mean and std over 1000
                    draws, then the mean over prompts
    worst@k/mean    worst of k, likewise
    maj@k/mean      accuracy of the most frequent answer among k (reward functions return it as
                    `pred`); ties go to the answer drawn first
    pass@k          probability that at least one of k different sessions is right:
                    1 - C(n - c, k) / C(n, k) where c of n have acc >= 1 (unbiased; Chen et al.
                    2021, arXiv:2107.03374)

A session on which the reward function failed counts in every denominator, as wrong and with score
0; `val-aux/<source>/reward_failures` is their number.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from rl_trainer.algorithms.arrays import FloatArray, IntArray
from rl_trainer.rewards.scorer import Failure, Outcome

DRAWS = 1000
_SEED = 42


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSession:
    """A validation session and its result."""

    source: str
    uid: str
    acc: float = 0.0
    score: float = 0.0
    pred: str | None = None
    """The answer found in the response; None if the reward function does not return one."""
    failed: bool = False

    @classmethod
    def of(cls, source: str, uid: str, outcome: Outcome) -> ScoredSession:
        """From the outcome of the reward function."""
        if isinstance(outcome, Failure):
            return cls(source=source, uid=uid, failed=True)
        numbers = outcome.numbers
        return cls(source=source, uid=uid, acc=numbers["acc"], score=numbers["score"], pred=outcome.texts.get("pred"))


def validation_metrics(sessions: Sequence[ScoredSession]) -> dict[str, float]:
    """All validation metrics of these sessions."""
    metrics: dict[str, float] = {}
    for source, groups in _by_source(sessions).items():
        most = max(map(len, groups))
        for name, value in _source_metrics(groups).items():
            core = name.startswith("acc/") and f"@{most}" in name and not name.startswith(("acc/std", "acc/worst"))
            metrics[f"val-{'core' if core else 'aux'}/{source}/{name}"] = value
        failures = sum(one.failed for group in groups for one in group)
        if failures:
            metrics[f"val-aux/{source}/reward_failures"] = float(failures)
    return metrics


def mean_accuracy(sessions: Sequence[ScoredSession]) -> float | None:
    """Mean over the data sources of `acc/mean@n`, n being the most sessions of a prompt there.

    None if there are no sessions.
    """
    accuracies: list[float] = []
    for groups in _by_source(sessions).values():
        most = max(map(len, groups))
        whole = [[one.acc for one in group] for group in groups if len(group) == most]
        accuracies.append(float(np.mean([np.mean(group) for group in whole])))
    return sum(accuracies) / len(accuracies) if accuracies else None


def pass_at_k(n: int, right: int, k: int) -> float:
    """Probability that k of n sessions, drawn without replacement, include a right one."""
    return 1.0 - comb(n - right, k) / comb(n, k)


def sizes(n: int) -> list[int]:
    """The values of k for a prompt with n sessions: 2, 4, 8, ... and n."""
    return sorted({2**i for i in range(1, n.bit_length()) if 2**i < n} | ({n} if n > 1 else set[int]()))


def _by_source(sessions: Sequence[ScoredSession]) -> dict[str, list[list[ScoredSession]]]:
    """Data source -> the sessions of each of its prompts."""
    found: dict[str, dict[str, list[ScoredSession]]] = {}
    for one in sessions:
        found.setdefault(one.source, {}).setdefault(one.uid, []).append(one)
    return {source: list(prompts.values()) for source, prompts in found.items()}


def _source_metrics(prompts: Sequence[Sequence[ScoredSession]]) -> dict[str, float]:
    """Means over prompts; each contributes to the metrics that its number of sessions allows."""
    values: dict[str, list[float]] = {}
    for group in prompts:
        for name, value in _prompt_metrics(group).items():
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(items)) for name, items in values.items()}


def _prompt_metrics(group: Sequence[ScoredSession]) -> dict[str, float]:
    n, out = len(group), dict[str, float]()
    acc, score = (np.array([getattr(one, name) for one in group]) for name in ("acc", "score"))
    for name, values in (("acc", acc), ("score", score)):
        out[f"{name}/mean@{n}"] = float(values.mean())
        if n > 1:
            out[f"{name}/std@{n}"] = float(values.std())
    preds = [one.pred for one in group if not one.failed]
    voted = bool(preds) and None not in preds
    classes = _classes(group)
    for k in sizes(n):
        drawn = _draws(n, k)
        for name, values in (("acc", acc), ("score", score)):
            out |= _summary(f"{name}/best@{k}", values[drawn].max(axis=1))
            out |= _summary(f"{name}/worst@{k}", values[drawn].min(axis=1))
        if voted:
            out |= _summary(f"acc/maj@{k}", majority(acc, classes, drawn))
        out[f"acc/pass@{k}"] = pass_at_k(n, int((acc >= 1).sum()), k)
    return out


@functools.cache
def _draws(n: int, k: int) -> IntArray:
    """[DRAWS, k] session numbers below n, drawn with replacement; the same for every prompt."""
    return np.random.default_rng(_SEED).integers(0, n, (DRAWS, k))


def _classes(group: Sequence[ScoredSession]) -> IntArray:
    """[n] class of each session's answer; a failed session has its own class."""
    answers: dict[object, int] = {}
    return np.array(
        [answers.setdefault((i,) if one.failed else one.pred, len(answers)) for i, one in enumerate(group)], np.int64
    )


def majority(acc: FloatArray, classes: IntArray, drawn: IntArray) -> FloatArray:
    """[draws] accuracy of the most frequent drawn answer; ties go to the one drawn first."""
    draws, k = drawn.shape
    chosen, count = classes[drawn], int(classes.max()) + 1
    rows = np.arange(draws)
    votes, first = np.zeros((draws, count), np.int64), np.full((draws, count), k)
    for place in reversed(range(k)):
        votes[rows, chosen[:, place]] += 1
        first[rows, chosen[:, place]] = place
    winner = np.argmax(votes * (k + 1) - first, axis=1)
    return acc[drawn[rows, first[rows, winner]]]


def _summary(name: str, values: FloatArray) -> dict[str, float]:
    return {f"{name}/mean": float(values.mean()), f"{name}/std": float(values.std())}
