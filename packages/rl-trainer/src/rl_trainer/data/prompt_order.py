"""Which prompts each step trains on."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from rl_protocol.support.options import require
from rl_trainer.data.curriculum import Curriculum, Shuffle


class PromptOrder:
    """Decides which rows each step trains on.

    The curriculum orders every epoch, with a generator seeded by (seed, epoch). A step may span two
    epochs. Any step can be queried at any time, so a resumed run trains on the same rows.

    Raises:
        ConfigError: the data set is empty.
    """

    def __init__(self, size: int, batch_size: int, seed: int, curriculum: Curriculum | None = None) -> None:
        require(size >= 1, "PromptOrder.size", "at least 1, for there are no prompts to train on otherwise", size)
        self._size = size
        self.batch_size = batch_size
        self._seed = seed
        self._curriculum = curriculum or Shuffle(size)

    def rows(self, step: int) -> list[int]:
        """[batch_size] row numbers of step `step` (from 0), if every step takes one batch."""
        return self.take(step * self.batch_size, self.batch_size)

    def take(self, start: int, count: int) -> list[int]:
        """[count] row numbers from position `start` of the endless sequence of prompts."""
        wanted = range(start, start + count)
        epochs = {place // self._size for place in wanted}
        orders = {e: self._curriculum.epoch(e, np.random.default_rng((self._seed, e))) for e in epochs}
        return [int(orders[place // self._size][place % self._size]) for place in wanted]

    def trained(self, places: Collection[int]) -> None:
        """The prompts at these places of the sequence were trained, and are not taken again."""

    def observe(self, step: int, scores: Mapping[int, tuple[float, float]]) -> dict[str, float]:
        """The rows that a step has trained, with mean and variance of the scores of their
        responses; returns metrics. Only `ScoredOrder` reads scores.
        """
        del step, scores
        return {}

    @property
    def state(self) -> bytes:
        """What a resumed run needs besides the position; empty: nothing."""
        return b""

    def restore(self, state: bytes) -> None:
        """Continue from a state."""
