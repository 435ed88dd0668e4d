"""Rows held out of a data set for validation."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rl_protocol import ConfigError
from rl_trainer.data.order import IntArray
from rl_trainer.data.prompts import PromptDataset, PromptRow


def hold_out(size: int, share: float) -> tuple[IntArray, IntArray]:
    """Row numbers of the training and of the validation part: disjoint, together all rows, each in ascending order.

    They follow from the arguments alone: runs with other seeds, resumed runs and every process get the same parts.

    Args:
        size: rows of the data set.
        share: of the validation part, in (0, 1); it gets at least one row, and leaves at least one.

    Raises:
        ConfigError: the data set has fewer than two rows.
    """
    if size < 2:
        raise ConfigError(
            f"data.train_files has {size} usable row, too few to hold one out for validation. Set data.val_files, or trainer.test_freq=0 "
            "for a run without validation."
        )
    count = min(max(1, round(share * size)), size - 1)
    shuffled = np.random.default_rng(0).permutation(size)
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


class Measured(PromptDataset, Protocol):
    """A data set, and what is known of it as a whole."""

    @property
    def rows_of_files(self) -> tuple[int, ...]:
        """Rows of each file that it is made of, one file behind the other."""
        ...

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        ...

    @property
    def largest_token(self) -> int:
        """Largest token id of all prompts."""
        ...


class Selected:
    """Some rows of a data set.

    Args:
        rows: the data set.
        numbers: [N] row numbers of it, ascending.
    """

    def __init__(self, rows: Measured, numbers: IntArray) -> None:
        self._rows = rows
        self._numbers = numbers
        ends = np.searchsorted(numbers, np.cumsum([0, *rows.rows_of_files]))
        self.rows_of_files: tuple[int, ...] = tuple(np.diff(ends).tolist())
        """Selected rows of each file, in order."""
        self.longest = rows.longest
        """Tokens of the longest prompt of the whole data set."""
        self.largest_token = rows.largest_token
        """Largest token id of the whole data set."""

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, row: int) -> PromptRow:
        return self._rows[int(self._numbers[row])]
