"""Curricula by name: `data.curriculum` chooses one that an installed package offers under the entry points `rl_trainer.curricula`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rl_protocol import ConfigError
from rl_trainer.algorithms.registry import Registry
from rl_trainer.data.order import Curriculum, IntArray, Sequential
from rl_trainer.data.prompts import PromptDataset


@dataclass(frozen=True)
class CurriculumKind:
    """How a curriculum is made for the rows of a run.

    `make` is called in the driver before a process starts and again when the run begins, a resumed one included: it may read every row, and equal
    rows must give equal curricula. What takes time belongs there; `Curriculum.epoch` is asked in every step.

    Example:
        class EasyFirst:
            def __init__(self, rows):
                self.difficulty = [rows[i].extra_info["difficulty"] for i in range(len(rows))]

            def epoch(self, number, rng):
                return rng.permutation(len(self.difficulty)) if number else numpy.argsort(self.difficulty, kind="stable")

        EASY_FIRST = CurriculumKind(EasyFirst)
    """

    make: Callable[[PromptDataset], Curriculum]


CURRICULA = Registry(
    "data.curriculum",
    "rl_trainer.curricula",
    CurriculumKind,
    {"sequential": CurriculumKind(lambda rows: Sequential(len(rows)))},
    {},
)
"""By name: those of installed packages, and the rows as they lie."""


class NamedCurriculum:
    """The curriculum of that name for these rows. Code of others fails by name here, and says nothing that can't be followed.

    Raises:
        ConfigError: there is none of that name, it may not load, or it can't be made for these rows.
    """

    def __init__(self, name: str, rows: PromptDataset) -> None:
        kind = CURRICULA.get(name)
        self._name, self._size = name, len(rows)
        try:
            self._curriculum = kind.make(rows)
        except Exception as error:  # the boundary to code of others, which may raise anything
            raise self._failed(f"can't be made for these {self._size} rows", error) from error

    def epoch(self, number: int, rng: np.random.Generator) -> IntArray:
        """See Curriculum.

        Raises:
            ConfigError: it failed, or what it said are not as many numbers of rows as there are rows.
        """
        try:
            order = np.asarray(self._curriculum.epoch(number, rng))
        except Exception as error:  # as above
            raise self._failed(f"failed in epoch {number}", error) from error
        if order.shape != (self._size,) or not np.issubdtype(order.dtype, np.integer):
            raise ConfigError(
                f"data.curriculum={self._name!r} must give {self._size} whole numbers for epoch {number}, one for each row there is; got "
                f"{order.dtype} of shape {order.shape}. Rows may be left out when others come again."
            )
        if (wrong := order[(order < 0) | (order >= self._size)]).size:
            raise ConfigError(
                f"data.curriculum={self._name!r} must give numbers of rows for epoch {number}, 0 to {self._size - 1}; got {wrong[0]}."
            )
        return order.astype(np.int64, copy=False)

    def _failed(self, what: str, error: Exception) -> ConfigError:
        return ConfigError(
            f"data.curriculum={self._name!r} {what}: {type(error).__name__}: {error}. Repair it, or leave data.curriculum empty to shuffle."
        )
