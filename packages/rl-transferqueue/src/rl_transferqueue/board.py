"""The board: one number per block slot in memory that the controller writes and every client of the host reads.

The epoch of a slot grows whenever a row or column leaves its block: cleared, replaced, moved, lost. A client that knows where rows were when
the epoch was e knows without asking that they still are there while it is e, because the controller changes the board before it answers
whoever made the change. Epochs never fall, so a slot that is used for another block never looks as before. Memory that a client still reads
is kept by its lease, not by the board.
"""

from __future__ import annotations

import mmap
import os
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rl_transferqueue.arena import map_memory
from rl_transferqueue.descriptor import ControllerAddress

_Epochs: TypeAlias = npt.NDArray[np.int64]


class Board:
    """Epochs of `slots` slots; slot 0 is never used.

    >>> board = Board(4)
    >>> before = board.epochs(np.array([1, 2]))
    >>> board.turn(2), board.epochs(np.array([1, 2])) == before
    (None, array([ True, False]))
    """

    def __init__(self, slots: int, memory: mmap.mmap | None = None) -> None:
        self._epochs: _Epochs = np.zeros(slots, np.int64) if memory is None else np.frombuffer(memory, np.int64, slots)

    def turn(self, slot: int) -> None:
        """What was known about the slot is not so any more."""
        self._epochs[slot] += 1

    def epochs(self, slots: npt.NDArray[np.int64]) -> _Epochs:
        """Epoch of each slot."""
        return self._epochs[slots]


class SharedBoard(Board):
    """The controller's side: memory that others can map; its pages exist once touched."""

    def __init__(self, slots: int) -> None:
        self.nbytes = -(-slots * np.dtype(np.int64).itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.memfd_create("rl-transferqueue-board", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.nbytes)
        super().__init__(slots, mmap.mmap(self.fd, self.nbytes))


class BoardView:
    """A client's side."""

    def __init__(self, controller: ControllerAddress) -> None:
        memory = map_memory(controller.process, controller.board_fd, controller.board_bytes, writable=False)
        self._epochs: _Epochs = np.frombuffer(memory, np.int64)

    def shows(self, slots: npt.NDArray[np.int64], epochs: _Epochs) -> bool:
        """Whether each slot still has that epoch."""
        return bool((self._epochs[slots] == epochs).all())
