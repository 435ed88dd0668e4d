"""Curricula: which rows an epoch trains on, in which order, and the registry of named curricula."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from rl_protocol import ConfigError
from rl_protocol.errors import located_error
from rl_trainer.config.registry import Registry
from rl_trainer.data.curricula.prompt_scores import FloatArray, PromptScores
from rl_trainer.data.curricula.scored import PrioritizedReplay, ScoredCurriculum, TargetScore
from rl_trainer.data.prompt_rows import PromptDataset

IntArray: TypeAlias = npt.NDArray[np.int64]


class Curriculum(Protocol):
    """Decides which rows an epoch trains on, and in which order.

    The result must depend only on the arguments, because a resumed run asks again.
    """

    def epoch(self, number: int, rng: np.random.Generator) -> IntArray:
        """[size of the data set] row numbers of epoch `number`, the first being 0.

        Rows may be omitted or occur more than once. `rng` is the same whenever the same epoch of
        the same run is asked for.
        """
        ...


class Shuffle:
    """Every row once, in a new random order each epoch."""

    def __init__(self, size: int) -> None:
        self._size = size

    def epoch(self, number: int, rng: np.random.Generator) -> IntArray:
        del number
        return rng.permutation(self._size)


class Sequential:
    """Every row once, in the order of the data set."""

    def __init__(self, size: int) -> None:
        self._size = size

    def epoch(self, number: int, rng: np.random.Generator) -> IntArray:
        del number, rng
        return np.arange(self._size)


class Mixture:
    """Parts of the data set in given shares of every epoch.

    Part i has the share weights[i] / sum(weights), rounded.

    If a part has more rows than its share, each epoch draws other rows of it; if it has fewer, its
    rows are repeated.

    Args:
        counts: rows of each part; the parts are concatenated in the data set.
        weights: of each part, finite and at least 0.

    Raises:
        ConfigError: a weight that is negative or not finite, no positive one, or a positive one for
            a part without rows.
    """

    def __init__(self, counts: Sequence[int], weights: Sequence[float]) -> None:
        sound = all(0 <= weight < math.inf for weight in weights) and sum(weights) > 0
        if not sound or any(w and not n for n, w in zip(counts, weights, strict=True)):
            raise ConfigError(
                f"Weights of data files must be finite and at least 0, one of them above 0, and 0 for files without usable rows; got "
                f"{list(weights)} for {list(counts)} rows."
            )
        self._counts = tuple(counts)
        self._starts = np.cumsum([0, *counts])
        bounds = np.rint(np.cumsum([0.0, *weights]) / sum(weights) * sum(counts)).astype(np.int64)
        self._shares = np.diff(bounds)

    def epoch(self, number: int, rng: np.random.Generator) -> IntArray:
        del number
        parts = [
            start + np.concatenate([rng.permutation(count) for _ in range(-(-share // count))])[:share]
            for start, count, share in zip(self._starts[:-1], self._counts, self._shares.tolist(), strict=True)
            if share
        ]
        return rng.permutation(np.concatenate(parts))


@dataclass(frozen=True)
class CurriculumKind:
    """Builds a curriculum for the rows of a run; packages register one as an entry point.

    The driver calls `make` before it starts any process and again when the run begins or resumes.
    `make` may read every row; equal rows must give equal curricula. Do slow work there, because
    `Curriculum.epoch` is called in every step.

    Example:
        class EasyFirst:
            def __init__(self, rows):
                self.difficulty = [rows[i].extra_info["difficulty"] for i in range(len(rows))]

            def epoch(self, number, rng):
                return rng.permutation(len(self.difficulty)) if number else
                numpy.argsort(self.difficulty, kind="stable")

        EASY_FIRST = CurriculumKind(EasyFirst)
    """

    make: Callable[[PromptDataset], Curriculum | ScoredCurriculum]


CURRICULA = Registry(
    "NamedCurriculum.name",
    "rl_trainer.curricula",
    CurriculumKind,
    {
        "sequential": CurriculumKind(lambda rows: Sequential(len(rows))),
        "target_score": CurriculumKind(lambda _: TargetScore()),
        "prioritized_replay": CurriculumKind(lambda _: PrioritizedReplay()),
    },
    {},
)
"""Curricula by name: built-in ones, and entry points of installed packages."""


class NamedCurriculum:
    """The curriculum `name` for these rows, with checked results and errors that name it.

    Raises:
        ConfigError: there is no such curriculum, it may not load, or it can't be built for these
            rows.
    """

    def __init__(self, name: str, rows: PromptDataset) -> None:
        kind = CURRICULA.get(name)
        self._name, self._size = name, len(rows)
        try:
            self._curriculum = kind.make(rows)
        except Exception as error:  # the boundary to plug-ins, which may raise anything
            raise self._failed(f"can't be built for these {self._size} rows", error) from error

    def epoch(self, number: int, rng: np.random.Generator) -> IntArray:
        """Row numbers of the epoch, as `Curriculum.epoch`.

        Raises:
            ConfigError: the curriculum failed, or did not return one valid row number per row.
        """
        assert not isinstance(self._curriculum, ScoredCurriculum)
        try:
            order = np.asarray(self._curriculum.epoch(number, rng))
        except Exception as error:  # as above
            raise self._failed(f"failed in epoch {number}", error) from error
        if order.shape != (self._size,) or not np.issubdtype(order.dtype, np.integer):
            raise ConfigError(
                f"NamedCurriculum.name={self._name!r} must return {self._size} integers for epoch {number}, one per row; got "
                f"{order.dtype} of shape {order.shape}. Rows may be omitted if others are repeated."
            )
        if (wrong := order[(order < 0) | (order >= self._size)]).size:
            raise ConfigError(
                f"NamedCurriculum.name={self._name!r} must return row numbers from 0 to {self._size - 1} for epoch {number}; got {wrong[0]}."
            )
        return order.astype(np.int64, copy=False)

    @property
    def sees_scores(self) -> bool:
        """Whether it is a ScoredCurriculum, which has `weights` and no `epoch`."""
        return isinstance(self._curriculum, ScoredCurriculum)

    def weights(self, scores: PromptScores) -> FloatArray:
        """[rows] weights, as `ScoredCurriculum.weights`.

        Raises:
            ConfigError: the curriculum failed, or did not return one weight per row.
        """
        assert isinstance(self._curriculum, ScoredCurriculum)
        try:
            weights = np.asarray(self._curriculum.weights(scores), np.float64)
        except Exception as error:  # as above
            raise self._failed(f"failed after step {scores.now}", error) from error
        if weights.shape != (self._size,) or not (np.isfinite(weights) & (weights >= 0)).all() or not weights.any():
            raise ConfigError(
                f"NamedCurriculum.name={self._name!r} must return {self._size} finite weights after step {scores.now}, one per row, none below 0 "
                f"and one above; got shape {weights.shape}, from {np.min(weights, initial=np.inf)} to {np.max(weights, initial=-np.inf)}."
            )
        return weights

    def _failed(self, what: str, error: Exception) -> ConfigError:
        return ConfigError(
            f"NamedCurriculum.name={self._name!r} {what}: {located_error(error)}. Fix it, or leave PromptOrder.curriculum empty to shuffle."
        )
