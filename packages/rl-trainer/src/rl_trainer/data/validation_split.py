"""Holds out rows of the training data for validation."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rl_protocol import ConfigError
from rl_trainer.data.curriculum import IntArray
from rl_trainer.data.prompt_rows import PromptDataset, PromptRow


def hold_out(size: int, share: float) -> tuple[IntArray, IntArray]:
    """Split row numbers into a training and a validation part.

    The parts are disjoint, complete and in ascending order. The result depends only on the
    arguments, so runs with other seeds, resumed runs and all processes get the same parts.

    Args:
        size: rows of the data set.
        share: fraction of rows held out, in (0, 1). Both parts get at least one row.

    Raises:
        ConfigError: the data set has fewer than two rows.
    """
    if size < 2:
        raise ConfigError(
            f"hold_out.size must be at least 2, to hold a row out for validation and have another to train on; got {size}. "
            "Set LoopConfig.test_freq=0 for a run without validation."
        )
    count = min(max(1, round(share * size)), size - 1)
    shuffled = np.random.default_rng(0).permutation(size)
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


class PreparedPrompts(PromptDataset, Protocol):
    """A data set with statistics over all of its prompts."""

    @property
    def rows_of_files(self) -> tuple[int, ...]:
        """Rows of each file; the files are concatenated in the data set."""
        ...

    @property
    def digests_of_files(self) -> tuple[str, ...]:
        """SHA-256 of each file, in order, as `file_digest` of `prompt_preparation` gives it."""
        ...

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        ...

    @property
    def largest_token(self) -> int:
        """Largest token id of all prompts."""
        ...

    @property
    def most_image_tokens(self) -> int:
        """Most tokens of a prompt that stand for images."""
        ...


class Subset:
    """Some rows of a data set.

    Args:
        rows: the data set.
        numbers: [N] row numbers of it, ascending.
    """

    def __init__(self, rows: PreparedPrompts, numbers: IntArray) -> None:
        self._rows = rows
        self._numbers = numbers
        ends = np.searchsorted(numbers, np.cumsum([0, *rows.rows_of_files]))
        self.rows_of_files: tuple[int, ...] = tuple(np.diff(ends).tolist())
        """Rows of each file that are in the subset."""
        self.digests_of_files = rows.digests_of_files
        """SHA-256 of each file."""
        self.longest = rows.longest
        """Tokens of the longest prompt of the whole data set."""
        self.largest_token = rows.largest_token
        """Largest token id of the whole data set."""
        self.most_image_tokens = rows.most_image_tokens
        """Most tokens of a prompt of the whole data set that stand for images."""

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, row: int) -> PromptRow:
        return self._rows[int(self._numbers[row])]
