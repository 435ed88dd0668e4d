"""The order of prompts."""

from __future__ import annotations

import numpy as np

from rl_protocol import ConfigError


class PromptOrder:
    """Which rows each step trains on: every epoch is a fresh permutation drawn from (seed, epoch); a step may span two epochs.

    Any step can be asked for at any time, so that a resumed run sees what the first one would have seen.

    Raises:
        ConfigError: the data set is empty.
    """

    def __init__(self, size: int, batch_size: int, seed: int) -> None:
        if size < 1:
            raise ConfigError("The training data set is empty; set data.train_size to at least 1, or data.train_files.")
        self._size = size
        self.batch_size = batch_size
        self._seed = seed

    def rows(self, step: int) -> list[int]:
        """[train_batch_size] row numbers of step `step` (the first is 0), while each step takes one batch."""
        return self.take(step * self.batch_size, self.batch_size)

    def take(self, start: int, count: int) -> list[int]:
        """[count] row numbers from place `start` of the endless sequence of prompts."""
        wanted = range(start, start + count)
        epochs = {place // self._size for place in wanted}
        orders = {e: np.random.default_rng((self._seed, e)).permutation(self._size) for e in epochs}
        return [int(orders[place // self._size][place % self._size]) for place in wanted]
