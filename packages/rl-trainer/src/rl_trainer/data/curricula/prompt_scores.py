"""Scores of the prompts of a data set so far: by prompt and by data source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SourceScore:
    """Scores of the prompts of one data source that were trained.

    Attributes:
        mean: over these prompts, of their mean scores.
        variance: over these prompts, of the variance of the responses to each.
        age: steps since one of them was trained, the least.
    """

    mean: float
    variance: float
    age: int


class ScoreState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """PromptScores in a checkpoint: little-endian arrays of the prompts that have scores."""

    now: int
    rows: bytes
    """int32."""
    mean: bytes
    """float64."""
    variance: bytes
    """float64."""
    step: bytes
    """int32."""


class PromptScores:
    """Scores of the newest responses to each prompt, from the policy that then was.

    >>> scores = PromptScores(["easy", "easy", "hard"], target=0.5)
    >>> scores.add(1, {0: (0.75, 0.1875)})
    >>> scores.add(3, {2: (0.0, 0.0)})
    >>> scores.mean.tolist(), scores.age.tolist(), scores.expected.tolist()
    ([0.75, nan, 0.0], [2, 3, 0], [0.75, 0.75, 0.0])
    >>> scores.by_source()["easy"]
    SourceScore(mean=0.75, variance=0.1875, age=2)

    Args:
        sources: [rows] data source of each row of the data set.
        target: mean score that a curriculum aims at (data.target_score).

    Attributes:
        mean: [rows] mean score of the newest responses; NaN: the row was not trained.
        variance: [rows] their variance; NaN as well.
        now: the newest step that was trained.
    """

    def __init__(self, sources: Sequence[str], target: float) -> None:
        names, self._source = np.unique(np.asarray(sources, dtype=np.str_), return_inverse=True)
        self._names: list[str] = names.tolist()
        self.target = target
        self.now = 0
        self.mean: FloatArray = np.full(len(sources), np.nan)
        self.variance: FloatArray = np.full(len(sources), np.nan)
        self._step = np.zeros(len(sources), np.int32)

    @property
    def seen(self) -> npt.NDArray[np.bool_]:
        """[rows] whether a row has a score."""
        return self._step > 0

    @property
    def age(self) -> npt.NDArray[np.int32]:
        """[rows] steps since each row was trained; since the begin of the run if it was not."""
        return np.int32(self.now) - self._step

    @property
    def expected(self) -> FloatArray:
        """[rows] the mean score, or that of the data source of a row that was not trained; NaN:
        the source has none.
        """
        known = self.by_source()
        of_source = np.array([known[name].mean if name in known else np.nan for name in self._names])
        return np.where(self.seen, self.mean, of_source[self._source])

    def add(self, step: int, scores: Mapping[int, tuple[float, float]]) -> None:
        """Note mean and variance of the responses to each row that a step has trained."""
        self.now = step
        rows = np.fromiter(scores, np.int64, len(scores))
        self._step[rows] = step
        self.mean[rows] = [mean for mean, _ in scores.values()]
        self.variance[rows] = [variance for _, variance in scores.values()]

    def by_source(self) -> dict[str, SourceScore]:
        """The data sources of which a prompt was trained."""
        rows = np.flatnonzero(self.seen)
        of_row, size = self._source[rows], len(self._names)
        counts = np.bincount(of_row, minlength=size)
        means, variances = (np.bincount(of_row, values[rows], size) for values in (self.mean, self.variance))
        newest = np.zeros(size, np.int32)
        np.maximum.at(newest, of_row, self._step[rows])
        return {
            self._names[i]: SourceScore(
                mean=float(means[i] / counts[i]),
                variance=float(variances[i] / counts[i]),
                age=self.now - int(newest[i]),
            )
            for i in np.flatnonzero(counts)
        }

    def state(self) -> ScoreState:
        """A copy, for a checkpoint."""
        rows = np.flatnonzero(self.seen)
        return ScoreState(
            now=self.now,
            rows=rows.astype("<i4").tobytes(),
            mean=self.mean[rows].astype("<f8").tobytes(),
            variance=self.variance[rows].astype("<f8").tobytes(),
            step=self._step[rows].astype("<i4").tobytes(),
        )

    def restore(self, state: ScoreState) -> None:
        """Continue from a copy, of a data set with equal rows."""
        self.now = state.now
        rows = np.frombuffer(state.rows, "<i4")
        self.mean[rows] = np.frombuffer(state.mean, "<f8")
        self.variance[rows] = np.frombuffer(state.variance, "<f8")
        self._step[rows] = np.frombuffer(state.step, "<i4")
