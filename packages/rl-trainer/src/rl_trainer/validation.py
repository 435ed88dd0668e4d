"""What validation says about a policy, by data source. Numpy only.

A prompt has n sessions; v_1..v_n are the values of one of them each. Names and sections are verl's: `val-core/<source>/acc/...` for what people
compare (with the largest n), `val-aux/...` for the rest.

    mean@n          mean over sessions, then over prompts
    std@n           standard deviation over the sessions of a prompt, then the mean over prompts
    best@k/mean     what the best of k sessions drawn with replacement has, by bootstrap: mean and std over 1000 draws, then the mean over prompts
    worst@k/mean    the worst of them
    maj@k/mean      the accuracy of the answer most of them give (reward functions return it as `pred`); ties go to the one drawn first
    pass@k          probability that one of k different sessions is right: 1 - C(n - c, k) / C(n, k) where c of n have acc >= 1 (unbiased;
                    Chen et al. 2021, arXiv:2107.03374)

A session on which the reward function failed counts in every denominator, as wrong and with the score 0; how many there were is
`val-aux/<source>/reward_failures`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
import numpy.typing as npt

from rl_trainer.rewards.outcomes import Failure, Outcome

DRAWS = 1000
_SEED = 42
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One validation session."""

    source: str
    uid: str
    acc: float = 0.0
    score: float = 0.0
    pred: str | None = None
    """The answer found in the response; None: the reward function does not say."""
    failed: bool = False

    @classmethod
    def of(cls, source: str, uid: str, outcome: Outcome) -> Judged:
        """As the reward function judged it."""
        if isinstance(outcome, Failure):
            return cls(source=source, uid=uid, failed=True)
        numbers = outcome.numbers
        return cls(source=source, uid=uid, acc=numbers["acc"], score=numbers["score"], pred=outcome.texts.get("pred"))


def validation_metrics(sessions: Sequence[Judged]) -> dict[str, float]:
    """All metrics of these sessions."""
    by_source: dict[str, dict[str, list[Judged]]] = {}
    for one in sessions:
        by_source.setdefault(one.source, {}).setdefault(one.uid, []).append(one)
    metrics: dict[str, float] = {}
    for source, prompts in by_source.items():
        groups = list(prompts.values())
        most = max(map(len, groups))
        for name, value in _of_source(groups).items():
            core = name.startswith("acc/") and f"@{most}" in name and not name.startswith(("acc/std", "acc/worst"))
            metrics[f"val-{'core' if core else 'aux'}/{source}/{name}"] = value
        failures = sum(one.failed for group in groups for one in group)
        if failures:
            metrics[f"val-aux/{source}/reward_failures"] = float(failures)
    return metrics


def pass_at_k(n: int, right: int, k: int) -> float:
    """Probability that k of n sessions, drawn without replacement, hold one of the `right` ones."""
    return 1.0 - comb(n - right, k) / comb(n, k)


def sizes(n: int) -> list[int]:
    """2, 4, 8, ... and n itself: the k of a prompt with n sessions."""
    return sorted({2**i for i in range(1, n.bit_length()) if 2**i < n} | ({n} if n > 1 else set[int]()))


def _of_source(prompts: Sequence[Sequence[Judged]]) -> dict[str, float]:
    """Means over prompts; each prompt contributes to what its number of sessions allows."""
    values: dict[str, list[float]] = {}
    for group in prompts:
        for name, value in _of_prompt(group).items():
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(items)) for name, items in values.items()}


def _of_prompt(group: Sequence[Judged]) -> dict[str, float]:
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
    """[DRAWS, k] sessions of n, with replacement; the same for every prompt."""
    return np.random.default_rng(_SEED).integers(0, n, (DRAWS, k))


def _classes(group: Sequence[Judged]) -> IntArray:
    """[n] number of each session's answer; a session that failed agrees with no other."""
    answers: dict[object, int] = {}
    return np.array(
        [answers.setdefault((i,) if one.failed else one.pred, len(answers)) for i, one in enumerate(group)], np.int64
    )


def majority(acc: FloatArray, classes: IntArray, drawn: IntArray) -> FloatArray:
    """[draws] accuracy of the answer that most of the drawn sessions give; of equally frequent ones, the one drawn first."""
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
