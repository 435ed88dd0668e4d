"""Epochs of block slots, in memory that the controller writes and the clients of its host read.

The epoch of a slot grows whenever a row or column leaves its block (cleared, replaced, moved or
lost). A client that located rows at epoch e knows that they are still there while the epoch is e:
the controller advances it before it answers the request that made the change. Epochs never
decrease, so a slot that is used for another block never shows an earlier epoch. Memory that a
client still reads is kept by its lease, not by the epoch.
"""

from __future__ import annotations

import mmap
import os
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rl_protocol.support.host.shared_memory import create_memory
from rl_transferqueue.memory.arena import map_memory
from rl_transferqueue.wire.descriptor import ControllerAddress

_Numbers: TypeAlias = npt.NDArray[np.int64]


class Epochs:
    """Epochs of `slots` slots; slot 0 is never used.

    >>> epochs = Epochs(4)
    >>> before = epochs.of(np.array([1, 2]))
    >>> epochs.advance(2), epochs.of(np.array([1, 2])) == before
    (None, array([ True, False]))
    """

    def __init__(self, slots: int, memory: mmap.mmap | None = None) -> None:
        self._numbers: _Numbers = (
            np.zeros(slots, np.int64) if memory is None else np.frombuffer(memory, np.int64, slots)
        )

    def advance(self, slot: int) -> None:
        """Invalidate what clients know about the slot."""
        self._numbers[slot] += 1

    def of(self, slots: npt.NDArray[np.int64]) -> _Numbers:
        """Epoch of each slot."""
        return self._numbers[slots]


class SharedEpochs(Epochs):
    """The controller's side: epochs in memory that clients can map."""

    def __init__(self, slots: int) -> None:
        self.nbytes = -(-slots * np.dtype(np.int64).itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = create_memory("rl-transferqueue-board")
        os.ftruncate(self.fd, self.nbytes)
        super().__init__(slots, mmap.mmap(self.fd, self.nbytes))


class EpochView:
    """A client's side: the mapped epochs."""

    def __init__(self, controller: ControllerAddress) -> None:
        memory = map_memory(controller.process, controller.board_fd, controller.board_bytes, writable=False)
        self._numbers: _Numbers = np.frombuffer(memory, np.int64)

    def unchanged(self, slots: npt.NDArray[np.int64], epochs: _Numbers) -> bool:
        """Whether each slot still has that epoch."""
        return bool((self._numbers[slots] == epochs).all())
