"""Which rows of one partition were consumed by which task."""

from __future__ import annotations

import numpy as np

from rl_transferqueue.controller.rows.slot_arrays import Resize
from rl_transferqueue.wire.arrays import Bools, Ints


class Consumption:
    """One flag per slot and task.

    Args:
        slots: how many slots there are.

    >>> consumption = Consumption(4)
    >>> consumption.mark(np.array([1, 2]), "train", True)
    >>> consumption.consumed(np.array([0, 1]), "train").tolist(), consumption.tasks
    ([False, True], ('train',))
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.flags: dict[str, Bools] = {}
        """By task."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks that consumed rows."""
        return tuple(self.flags)

    def mark(self, slots: Ints, task: str, consumed: bool) -> None:
        """Mark the rows as consumed by `task`, or as not consumed."""
        if task not in self.flags:
            self.flags[task] = np.zeros(self._slots, np.bool_)
        self.flags[task][slots] = consumed

    def consumed(self, slots: Ints, task: str) -> Bools:
        """Which of the rows are consumed by `task`."""
        if task not in self.flags:
            return np.zeros(slots.size, np.bool_)
        return self.flags[task][slots]

    def clear(self, slots: Ints) -> None:
        """No task has consumed the rows."""
        for flags in self.flags.values():
            flags[slots] = False

    def resize(self, slots: int, change: Resize) -> None:
        """There are `slots` slots from now on; `change` brings each array to its new form."""
        self._slots = slots
        self.flags = {task: change(array) for task, array in self.flags.items()}
