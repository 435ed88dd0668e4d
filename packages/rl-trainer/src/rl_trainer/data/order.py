"""The order of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rl_protocol import ConfigError

IntArray = npt.NDArray[np.int64]


class Curriculum(Protocol):
    """Which rows an epoch trains on, and in which order. It depends on nothing but its arguments: a resumed run asks again."""

    def epoch(self, number: int, rng: np.random.Generator) -> IntArray:
        """[size of the data set] row numbers of epoch `number`, the first being 0; rows may be left out and occur more than once.

        `rng` is the same whenever the same epoch of the same run is asked for.
        """
        ...


class Shuffle:
    """Every row once, in a fresh random order each epoch."""

    def __init__(self, size: int) -> None:
        self._size = size

    def epoch(self, number: int, rng: np.random.Generator) -> IntArray:
        """See Curriculum."""
        del number
        return rng.permutation(self._size)


class Sequential:
    """Every row once, in the order of the data set."""

    def __init__(self, size: int) -> None:
        self._size = size

    def epoch(self, number: int, rng: np.random.Generator) -> IntArray:
        """See Curriculum."""
        del number, rng
        return np.arange(self._size)


class Mixture:
    """Parts of the data set in given shares: of every epoch, part i makes up weights[i] / sum(weights), rounded so that they add up.

    A part with more rows than its share gives other rows each epoch; one with fewer is gone through as often as it takes.

    Args:
        counts: rows of each part; the parts lie one behind the other.
        weights: of each part, at least 0.

    Raises:
        ConfigError: weights that are negative or all 0, or one for a part without rows.
    """

    def __init__(self, counts: Sequence[int], weights: Sequence[float]) -> None:
        if min(weights) < 0 or not sum(weights) or any(w and not n for n, w in zip(counts, weights, strict=True)):
            raise ConfigError(
                f"Weights of data files must be at least 0, one of them above 0, and 0 for files without usable rows; got {list(weights)} for "
                f"{list(counts)} rows."
            )
        self._counts = tuple(counts)
        self._starts = np.cumsum([0, *counts])
        bounds = np.rint(np.cumsum([0.0, *weights]) / sum(weights) * sum(counts)).astype(np.int64)
        self._shares = np.diff(bounds)

    def epoch(self, number: int, rng: np.random.Generator) -> IntArray:
        """See Curriculum."""
        del number
        parts = [
            start + np.concatenate([rng.permutation(count) for _ in range(-(-share // count))])[:share]
            for start, count, share in zip(self._starts, self._counts, self._shares.tolist(), strict=False)
            if share
        ]
        return rng.permutation(np.concatenate(parts))


class PromptOrder:
    """Which rows each step trains on: every epoch is drawn from (seed, epoch) by the curriculum; a step may span two epochs.

    Any step can be asked for at any time, so that a resumed run sees what the first one would have seen.

    Raises:
        ConfigError: the data set is empty.
    """

    def __init__(self, size: int, batch_size: int, seed: int, curriculum: Curriculum | None = None) -> None:
        if size < 1:
            raise ConfigError("The training data set is empty; set data.train_size to at least 1, or data.train_files.")
        self._size = size
        self.batch_size = batch_size
        self._seed = seed
        self._curriculum = curriculum or Shuffle(size)

    def rows(self, step: int) -> list[int]:
        """[train_batch_size] row numbers of step `step` (the first is 0), while each step takes one batch."""
        return self.take(step * self.batch_size, self.batch_size)

    def take(self, start: int, count: int) -> list[int]:
        """[count] row numbers from place `start` of the endless sequence of prompts."""
        wanted = range(start, start + count)
        epochs = {place // self._size for place in wanted}
        orders = {e: self._curriculum.epoch(e, np.random.default_rng((self._seed, e))) for e in epochs}
        return [int(orders[place // self._size][place % self._size]) for place in wanted]
